"""The pool, for classes that verl makes by their names: nobody can hand it to them."""

from stepwell.pool.client import DataPool, connect
from stepwell.trainers.verl.mode_settings import PoolModeSettings


def connected_pool(settings: PoolModeSettings) -> DataPool:
    """verl's processes have joined Ray already; it must be the pool's."""
    return connect(settings.pool, namespace=settings.namespace)
