"""The demo's DataPool, on its own Ray cluster on loopback, which ends with the demo."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from stepwell.demo.run import keeping_sigterm
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client.ray_cluster import local_ray, make_ray_folder

if TYPE_CHECKING:
    from stepwell.pool.client import DataPool

NAMESPACE = "stepwell-demo"
STORE = 128 * 2**20
"""Bytes of Ray's object store: more than the demo uses."""


@contextmanager
def demo_ray() -> Iterator[str]:
    """Yields its address."""
    folder = make_ray_folder()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        with keeping_sigterm():
            joining = stack.enter_context(local_ray(NAMESPACE, token=token, store=STORE, folder=folder))
        yield joining["RAY_ADDRESS"]


def demo_limits(*, batch: int, ahead: int) -> Limits:
    """For batches of `batch` rollouts, with agents that may be `ahead` batches ahead of the trainer.

    No step is dropped for its age: the trainer corrects for it.
    """
    return Limits(batch_size=batch, max_staleness=ahead, on_stale="keep")


def pool_with(name: str, limits: Limits) -> "DataPool":
    from stepwell.pool.actors import start_pool
    from stepwell.pool.client import DataPool, PoolClient

    start_pool(PoolPlan(name=name, limits=limits), NAMESPACE)
    return DataPool(PoolClient(name, NAMESPACE))
