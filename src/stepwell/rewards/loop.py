"""The way of a reward: taken from the pool under lease, scored, given back; forever.

What always holds: taking, scoring and giving back go on at the same time, each in messages of many; what the pool does
not answer is asked again; a sample whose lease is over before it was scored is left to whoever takes it next.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from stepwell.errors import StepwellError
from stepwell.pool.api.ports import RewardSource
from stepwell.pool.api.scoring import Judgement
from stepwell.rewards.pace import Pace
from stepwell.rewards.sample import sample_of
from stepwell.rewards.sandbox.runner import Runner
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.rewards")

LEASE = 30.0
"""Seconds beyond the time of two calls: what a killed worker held is scored by another one after that."""
TAKE_TIMEOUT = 30.0
GATHER = 0.01
"""Seconds for which judgements gather before they are sent."""
PAUSE = 1.0
"""Seconds after which a pool that did not answer is asked again."""


class RewardLoop:
    def __init__(self, runner: Runner, port: RewardSource) -> None:
        self._runner = runner
        self._port = port
        self._lease = LEASE + 2 * runner.job.timeout
        self._pace = Pace(runner.slots)
        self._has_room = asyncio.Event()
        self._done: list[Judgement] = []
        self._has_done = asyncio.Event()
        self._judging: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take())
            both.create_task(self._give())

    async def _take(self) -> None:
        while True:
            while (room := self._pace.room()) == 0:
                self._has_room.clear()
                await self._has_room.wait()
            try:
                taken = await self._port.take_unscored(room, lease=self._lease, timeout=TAKE_TIMEOUT)
            except StepwellError as failure:
                log.warning("nothing to score can be had now: %s", failure)
                await asyncio.sleep(PAUSE)
                continue
            if taken is not None:
                self._begin(*taken)

    def _begin(self, lease_uid: str, trajectories: Sequence[Sequence[Step]]) -> None:
        self._pace.take(len(trajectories))
        for steps in trajectories:
            judging = asyncio.create_task(self._judge(lease_uid, steps))
            self._judging.add(judging)
            judging.add_done_callback(self._judging.discard)

    async def _judge(self, lease_uid: str, steps: Sequence[Step]) -> None:
        try:
            async with asyncio.timeout(self._lease):
                attempt = await self._runner.run(sample_of(steps))
        except TimeoutError:
            self._finish(1)
            return
        self._done.append(
            Judgement(
                trajectory_uid=steps[0].trajectory_uid,
                prompt_uid=steps[0].prompt_uid,
                lease_uid=lease_uid,
                outcome=attempt.outcome,
                score=attempt.score,
                why=attempt.why,
                source=self._runner.name,
                seconds=attempt.seconds,
            )
        )
        self._has_done.set()

    async def _give(self) -> None:
        while True:
            await self._has_done.wait()
            await asyncio.sleep(GATHER)
            judgements, self._done = self._done, []
            self._has_done.clear()
            await self._give_until_taken(judgements)
            self._finish(len(judgements))

    async def _give_until_taken(self, judgements: list[Judgement]) -> None:
        while True:
            try:
                await self._port.give_judgements(judgements)
                return
            except StepwellError as failure:
                log.warning("%d judgements wait for the pool: %s", len(judgements), failure)
                await asyncio.sleep(PAUSE)

    def _finish(self, count: int) -> None:
        self._pace.finish(count, time.monotonic())
        self._has_room.set()
