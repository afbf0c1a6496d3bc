"""A shard of the DataPool: a Ray shell around the pool's rules. It holds the actor and the waiting, and no rule.

Every method may be called again after a lost answer. Steps travel packed, both ways.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from stepwell.core.batch import Batch, make_batch
from stepwell.core.columns import Columns, unpack
from stepwell.core.limits import Limits
from stepwell.core.pool import TRAIN, Ending, Pool, Registration, Verdict
from stepwell.core.stats import PoolStats
from stepwell.core.step import Step
from stepwell.errors import BadRequest, FetchTimeout

T = TypeVar("T")

WAITERS = 10_000
"""Calls served at once. A waiting fetch occupies one, so there must be far more than consumers."""

START_TIMEOUT = 60.0


class PoolShard:
    def __init__(self, limits: Limits) -> None:
        self._pool = Pool(limits)
        self._groups_changed = asyncio.Condition()
        self._version_changed = asyncio.Condition()

    async def submit_steps(
        self, steps: Columns, channel: str | None = None, group_size: int | None = None
    ) -> list[Verdict]:
        verdicts = self._pool.submit(unpack(steps, copy=True), channel=channel, group_size=group_size)
        await notify(self._groups_changed)
        return verdicts

    async def register_trajectory(self, wanted: Registration) -> None:
        self._pool.register(wanted)

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None = None) -> Ending:
        ending = self._pool.complete(trajectory_uid, prompt_uid, reward)
        await notify(self._groups_changed)
        return ending

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> Ending:
        return self._pool.abort(trajectory_uid, prompt_uid)

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        return self._pool.knows(trajectory_uid, prompt_uid)

    async def fetch_batch(self, groups: int, channel: str = TRAIN, timeout: float = 60.0) -> Batch:
        """The oldest ready groups, once there are that many. FetchTimeout says what was still missing."""
        if groups < 1:
            raise BadRequest(f"a batch has at least one group, not {groups}")
        taken = await wait_for(self._groups_changed, lambda: self._pool.take(groups, channel), timeout)
        if taken is None:
            raise FetchTimeout(f"waited {timeout:g} s for {self._pool.waiting_for(groups, channel)}")
        return make_batch(taken)

    async def set_policy_version(self, version: int) -> None:
        """Tell every gateway that tokens sampled from now on come from these weights."""
        self._pool.policy_version = version
        await notify(self._version_changed)

    async def policy_version(self, other_than: int | None = None, timeout: float = 0.0) -> int:
        """The version now; with `other_than`, as soon as it differs from that, or after `timeout`."""
        await wait_for(self._version_changed, lambda: self._pool.policy_version != other_than or None, timeout)
        return self._pool.policy_version

    async def stats(self) -> PoolStats:
        return self._pool.stats()

    async def quarantined(self) -> list[Step]:
        """The last steps that were quarantined, each with its reason."""
        return list(self._pool.quarantine)


async def notify(changed: asyncio.Condition) -> None:
    async with changed:
        changed.notify_all()


async def wait_for(changed: asyncio.Condition, attempt: Callable[[], T | None], timeout: float) -> T | None:
    """What `attempt` gives as soon as it gives something; it is tried at each change. None after `timeout`."""
    async with changed:
        try:
            async with asyncio.timeout(timeout):
                while (found := attempt()) is None:
                    await changed.wait()
        except TimeoutError:
            return None
        return found


def start_pool(name: str, namespace: str, limits: Limits) -> None:
    """Create the actor, or find it if it is there. It outlives whoever started it, and restarts if it dies."""
    actor = ray.remote(PoolShard).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=WAITERS,
        num_cpus=0,
    )
    shard: Any = actor.remote(limits)
    ray.get(shard.policy_version.remote(), timeout=START_TIMEOUT)
