"""A pool in this process, for the gateway that the doctor runs: it writes down the steps, and nothing else happens."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from stepwell.pool.api.pacing import Pacing
from stepwell.pool.rules.ingest import Ending, Registration, Reward, Verdict
from stepwell.steps.step import Step


class Notebook:
    """A PoolPort."""

    policy_version = 0

    def __init__(self) -> None:
        self._steps: dict[str, list[Step]] = defaultdict(list)

    def steps(self, trajectory_uid: str) -> tuple[Step, ...]:
        """In the order in which they came; quarantined ones too."""
        return tuple(self._steps[trajectory_uid])

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[Verdict]:
        for step in steps:
            self._steps[step.trajectory_uid].append(step)
        return [Verdict.ACCEPTED] * len(steps)

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        return True

    async def register_trajectory(self, wanted: Registration) -> None:
        pass

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None) -> Ending:
        return Ending.COMPLETED

    async def give_reward(self, reward: Reward) -> bool:
        return False

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> Ending:
        return Ending.ABORTED

    async def pacing(self, channel: str) -> Pacing:
        return Pacing(batch=0, batches_ahead=1, in_flight=0, queued=0)

    async def check(self) -> None:
        pass

    async def follow(self) -> None:
        await asyncio.Event().wait()
