"""The pool, for classes that verl makes by their names: nobody can hand it to them."""

from stepwell.pool.client import connect
from stepwell.trainers.ports import TrainingPool
from stepwell.trainers.verl.mode_settings import PoolModeSettings


def connected_pool(settings: PoolModeSettings) -> TrainingPool:
    """verl's processes have joined Ray already; it must be the pool's."""
    return connect(settings.pool, namespace=settings.namespace)
