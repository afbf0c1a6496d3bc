"""Rollouts that wait for a reward in a real DataPool, and the workers that give it."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stepwell.pool.actors import start_pool

from rig.builders import make_step
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.stats import ScoringStats
from stepwell.pool.client import DataPool, PoolClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.worker import RewardPlan, start_rewards
from stepwell.steps.step import Json

POOL = "data_pool"
WORKERS = "rewards"


class HastyPool(PoolClient):
    """Offers what a killed worker held to others sooner than the worker asked for, so that a test need not wait."""

    def __init__(self, name: str, namespace: str, longest_lease: float) -> None:
        super().__init__(name, namespace)
        self._longest_lease = longest_lease

    async def take_unscored(self, count: int, *, lease: float, timeout: float, by_step: bool = False) -> Any:
        lease = min(lease, self._longest_lease)
        return await super().take_unscored(count, lease=lease, timeout=timeout, by_step=by_step)


class Scored:
    """A pool that requires rewards, in a Ray namespace of its own."""

    def __init__(self, namespace: str, *, shards: int = 1, journal: str | None = None, **limits: Any) -> None:
        self.namespace = namespace
        self.client = PoolClient(POOL, namespace)
        self.pool = DataPool(self.client)
        required = Limits(require_reward=True, **limits)
        start_pool(PoolPlan(name=POOL, shards=shards, limits=required, journal=journal), namespace)

    def work(self, function: str, *, workers: int = 2, longest_lease: float = 60.0, **job: Any) -> None:
        plan = RewardPlan(name=WORKERS, workers=workers, job=Job(function=function, **{"timeout": 20.0, **job}))
        start_rewards(plan, partial(HastyPool, POOL, self.namespace, longest_lease), self.namespace)

    def put(
        self,
        count: int,
        *,
        first: int = 0,
        group_size: int = 1,
        prompt_uid: str | None = None,
        turns: int = 1,
        reward: float | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> None:
        """Complete rollouts, numbered; each knows its number."""

        async def put(number: int) -> None:
            uid, group = f"t{number}", prompt_uid or f"p{number // group_size}"
            said = {"number": number, **(metadata or {})}
            await self.client.register_trajectory(Registration(uid, group, None, group_size, said))
            steps = [make_step(uid, group, uid=f"{uid}-{turn}", started_at=turn) for turn in range(turns)]
            assert await self.client.submit_steps(steps) == [SubmitVerdict.ACCEPTED] * turns
            assert await self.client.complete_trajectory(uid, group, reward) is EndResult.COMPLETED

        async def put_all() -> None:
            for start in range(first, first + count, 50):
                await asyncio.gather(*(put(number) for number in range(start, min(start + 50, first + count))))

        asyncio.run(put_all())

    @property
    def scoring(self) -> ScoringStats:
        return self.pool.stats().scoring


def written(folder: Path, functions: str) -> str:
    """The path of a file with those reward functions."""
    path = folder / "functions.py"
    path.write_text(functions)
    return str(path)
