"""The demo's DataPool: on a Ray of its own, on loopback, which ends with the demo."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.pool.client import DataPool

NAMESPACE = "stepwell-demo"
STORE = 128 * 2**20
"""Bytes of Ray's object store: more than the demo ever has in it."""


@contextmanager
def local_ray() -> Iterator[str]:
    """Gives its address. Ray reads its settings when it is imported: not before this. Child processes inherit them."""
    settings = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every port on 127.0.0.1
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_BACKEND_LOG_LEVEL": "error",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    os.environ.update(settings)
    import ray

    ray.init(
        num_cpus=2,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=NAMESPACE,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def make_pool(name: str, *, batch: int, ahead: int) -> "DataPool":
    """A pool for batches of so many rollouts, with agents that may be so many batches ahead of the trainer.

    Nothing is dropped for its age: the trainer counts with it.
    """
    from stepwell.core.limits import Limits, OnStale
    from stepwell.pool.actor import PoolPlan, start_pool
    from stepwell.pool.client import DataPool, PoolClient

    limits = Limits(batch_size=batch, max_staleness=ahead, on_stale=OnStale.KEEP)
    start_pool(PoolPlan(name=name, limits=limits), NAMESPACE)
    return DataPool(PoolClient(name, NAMESPACE))
