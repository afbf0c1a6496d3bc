"""A pool in the test's own process: the real rules without Ray, and a switch that takes it away."""

import asyncio
from collections.abc import Sequence
from typing import Any

from stepwell.core.intake import Ending, Registration, Reward, Verdict
from stepwell.core.lease import Wanted
from stepwell.core.limits import Limits
from stepwell.core.pacing import Pacing
from stepwell.core.step import Exactness, Step
from stepwell.errors import PoolUnavailable
from tests.builders import EasyPool


class MemoryPool:
    def __init__(self, **limits: Any) -> None:
        self.rules = EasyPool(Limits(**limits))
        self.away = False
        self.loses_answers = 0
        """How many submissions still to take and then fail to answer for, as an actor does that dies too early."""
        self.messages: list[int] = []
        """How many steps each message had that was taken."""

    @property
    def policy_version(self) -> int:
        return self.rules.policy_version

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        await self.check()
        return self.rules.knows(trajectory_uid, prompt_uid)

    async def register_trajectory(self, wanted: Registration) -> None:
        await self.check()
        self.rules.register(wanted)

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[Verdict]:
        await self.check()
        self.messages.append(len(steps))
        verdicts = self.rules.submit(steps, channel=channel, group_size=group_size)
        if self.loses_answers:
            self.loses_answers -= 1
            raise PoolUnavailable("the answer was lost")
        return verdicts

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None) -> Ending:
        await self.check()
        return self.rules.complete(trajectory_uid, prompt_uid, reward)

    async def give_reward(self, reward: Reward) -> bool:
        await self.check()
        return self.rules.intake.reward(reward)

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> Ending:
        await self.check()
        return self.rules.abort(trajectory_uid, prompt_uid)

    async def pacing(self, channel: str) -> Pacing:
        await self.check()
        return self.rules.pacing(channel)

    async def check(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise PoolUnavailable("the pool is away")

    async def follow(self) -> None:
        await asyncio.Event().wait()

    def taken(self, channel: str = "train") -> list[Step]:
        """The steps of the oldest ready group, those that a trainer would leave out included."""
        groups = self.rules.take(1, channel, untrainable=True, min_exactness=Exactness.RETOKENIZED)
        assert groups is not None, self.rules.waiting_for(Wanted(count=1, channel=channel))
        return groups[0]
