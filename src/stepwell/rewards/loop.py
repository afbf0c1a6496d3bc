"""The reward loop: takes trajectories from the pool under a lease, scores them, returns the judgements; forever.

- Taking, scoring and returning run at the same time, each in messages of many trajectories.
- A call that the pool does not answer is repeated.
- A trajectory that is not scored within its lease is left to the worker that takes it next.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from stepwell.common.async_calls import Backoff, retry_while_unavailable
from stepwell.errors import StepwellError
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.client import PoolClient
from stepwell.rewards.runner.runner import RewardRunner
from stepwell.rewards.sample import sample_of
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.rewards")

T = TypeVar("T")

SPARE_LEASE = 30.0
"""Seconds of a lease beyond the time of two calls. After a lease, another worker scores what a killed worker held."""
TAKE_TIMEOUT = 30.0
GATHER = 0.01
"""Seconds for which judgements are gathered before they are sent."""
MOST_HELD = 2_048


class HoldingPace:
    """How many trajectories a worker holds: those that it works on, and about one second of work more.

    More would keep them from other workers, and their leases would expire here if the function became slow. Fewer
    would let the children wait while the pool is asked.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held = 0
        self._since = 0.0
        self._finished = 0
        self._per_second = 0.0

    def room(self) -> int:
        """How many to take now; 0 if they are too few for a message."""
        target = min(MOST_HELD, self._slots + int(max(self._finished, self._per_second)))
        room = target - self._held
        return room if 2 * room >= target else 0

    def take(self, count: int) -> None:
        self._held += count

    def finish(self, count: int, now: float) -> None:
        self._held -= count
        self._finished += count
        if now - self._since >= 1.0:
            self._per_second = self._finished / (now - self._since)
            self._since, self._finished = now, 0


class RewardLoop:
    def __init__(
        self, runner: RewardRunner, pool: PoolClient, *, lease: float | None = None, retry_pause: float = 1.0
    ) -> None:
        """`lease`, in seconds, depends on the runner's timeout by default; a pool that does not answer is asked again
        after `retry_pause` seconds."""
        self._runner = runner
        self._pool = pool
        self._lease = SPARE_LEASE + 2 * runner.job.timeout if lease is None else lease
        self._pauses = Backoff(first=retry_pause, longest=retry_pause)
        self._pace = HoldingPace(runner.slots)
        self._has_room = asyncio.Event()
        self._judgements: list[Judgement] = []
        self._has_judgements = asyncio.Event()
        self._scoring: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take())
            tasks.create_task(self._give())

    async def _take(self) -> None:
        while True:
            while (room := self._pace.room()) == 0:
                self._has_room.clear()
                await self._has_room.wait()
            by_step = self._runner.by_step
            take = partial(self._pool.take_unscored, room, lease=self._lease, timeout=TAKE_TIMEOUT, by_step=by_step)
            if (taken := await self._until_answered(take, "no trajectories can be taken now")) is not None:
                self._start_scoring(*taken)

    def _start_scoring(self, lease_uid: str, trajectories: Sequence[Sequence[Step]]) -> None:
        self._pace.take(len(trajectories))
        for steps in trajectories:
            task = asyncio.create_task(self._score(lease_uid, steps))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score(self, lease_uid: str, steps: Sequence[Step]) -> None:
        try:
            async with asyncio.timeout(self._lease):
                attempt = await self._runner.run(sample_of(steps))
        except TimeoutError:
            self._finish(1)
            return
        self._judgements.append(
            Judgement(
                trajectory_uid=steps[0].trajectory_uid,
                prompt_uid=steps[0].prompt_uid,
                lease_uid=lease_uid,
                attempt=attempt,
                source=self._runner.name,
                steps=tuple(step.identity for step in steps),
            )
        )
        self._has_judgements.set()

    async def _give(self) -> None:
        while True:
            await self._has_judgements.wait()
            await asyncio.sleep(GATHER)
            judgements, self._judgements = self._judgements, []
            self._has_judgements.clear()
            give = partial(self._pool.give_judgements, judgements)
            await self._until_answered(give, f"{len(judgements)} judgements wait for the pool")
            self._finish(len(judgements))

    async def _until_answered(self, call: Callable[[], Awaitable[T]], trouble: str) -> T:
        def log_failure(failure: StepwellError, pause: float) -> float:
            log.warning("%s: %s", trouble, failure)
            return pause

        return await retry_while_unavailable(call, StepwellError, self._pauses, before_pause=log_failure)

    def _finish(self, count: int) -> None:
        self._pace.finish(count, time.monotonic())
        self._has_room.set()
