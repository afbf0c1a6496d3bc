"""RewardRunner: calls a reward function in processes that can be killed; returns an Attempt for every sample.

- The function's code never runs in this process.
- A call ends in a score, an error or a timeout, whatever the function does. A child that ends is replaced.
- There are as many children as the job says. If the calls of all children have stalled and samples wait, there is one
  more, up to twice as many.
"""

import asyncio
import pickle

from stepwell.errors import StepwellError
from stepwell.pool.api.scoring import Attempt, JudgementOutcome
from stepwell.rewards.runner.child_process import RewardChild, start_child
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.sample import Sample


class RewardRunner:
    """`async with RewardRunner(job) as runner: await runner.run(sample)`, or `start` and `close`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.name = job.function
        """The source of its scores."""
        self.by_step = False
        """Does it judge single steps, of open trajectories too?"""
        self.slots = job.children
        """Calls that can run at once."""
        self._queue = SampleQueue()
        self._prefetch = Prefetch()
        self._tasks: list[asyncio.Task[None]] = []
        self._lane_count = 0
        """Children that work or are being started."""
        self._lanes: set[ChildLane] = set()

    async def start(self) -> None:
        """BadRequest if the function cannot be loaded."""
        child, function = await start_child(self.job)
        self.name, self.by_step = function.name, function.by_step
        if function.is_async:
            self._prefetch = Prefetch(max(1, self.job.calls // self.job.children))
            self.slots = self._prefetch.size * self.job.children
        for place in range(self.job.children):
            self._open_lane(child if place == 0 else None)
        self._tasks.append(asyncio.create_task(self._add_lanes_when_stalled()))

    async def run(self, sample: Sample, *, urgent: bool = False) -> Attempt:
        """Samples are called in order; an urgent one, whose caller waits, comes before all others."""
        queued = QueuedSample(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL), asyncio.get_running_loop().create_future())
        if urgent:
            self._queue.put_first([queued])
        else:
            self._queue.put(queued)
        return await queued.attempt

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "RewardRunner":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _add_lanes_when_stalled(self) -> None:
        while True:
            await asyncio.sleep(STALLED_AFTER)
            self._tasks = [task for task in self._tasks if not task.done()]
            stalled = sum(lane.is_stalled for lane in self._lanes)
            if stalled == self._lane_count < 2 * self.job.children and not self._queue.is_empty():
                self._open_lane(None)

    def _open_lane(self, child: RewardChild | None) -> None:
        self._lane_count += 1
        self._tasks.append(asyncio.create_task(self._run_lane(child)))

    def _has_spare_lane(self) -> bool:
        return self._lane_count > self.job.children

    async def _run_lane(self, child: RewardChild | None) -> None:
        """One child after another, until there are more lanes than the job says."""
        while True:
            try:
                await self._run_child(child or (await start_child(self.job))[0])
            except StepwellError as why:
                if not self._has_spare_lane():
                    await self._fail_one(f"no process can be started for it: {why}")
            if self._has_spare_lane():
                self._lane_count -= 1
                return
            child = None

    async def _run_child(self, child: RewardChild) -> None:
        lane = ChildLane(child, self._queue, self._prefetch, timeout=self.job.timeout, may_leave=self._has_spare_lane)
        self._lanes.add(lane)
        try:
            await lane.run()
        finally:
            self._lanes.discard(lane)

    async def _fail_one(self, why: str) -> None:
        """One error per failed start, so that samples do not wait forever."""
        for queued in await self._queue.take(1):
            queued.finish(Attempt(JudgementOutcome.ERROR, why=why))
