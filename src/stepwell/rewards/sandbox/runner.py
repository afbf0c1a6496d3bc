"""The Runner: calls a reward function in processes that can be killed, and gives an Attempt for every sample.

What always holds: the function's code never runs in this process; a child that ends is replaced; a call ends in a
score, an error or a timeout, whatever the function does. There are as many children as the job says; only while all of
them are in calls that have stalled, and samples wait, there is one more, up to twice as many.
"""

import asyncio
import pickle

from stepwell.errors import StepwellError
from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.rewards.attempt import Attempt
from stepwell.rewards.sample import Sample
from stepwell.rewards.sandbox.child_process import Child, Hello, start_child
from stepwell.rewards.sandbox.job import Job
from stepwell.rewards.sandbox.lane import PATIENCE, Service
from stepwell.rewards.sandbox.prefetch import Window
from stepwell.rewards.sandbox.queue import Asked, Backlog


class Runner:
    """`async with Runner(job) as runner: await runner.run(sample)`, or `start` and `close`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.name = job.function
        """The source of its scores."""
        self.slots = job.children
        """Calls that can be under way at once."""
        self._backlog = Backlog()
        self._window = Window()
        self._tasks: list[asyncio.Task[None]] = []
        self._lanes = 0
        """Children that work, or are being started."""
        self._services: set[Service] = set()

    async def start(self) -> None:
        """BadRequest, in words, if the function cannot be had."""
        child, hello = await start_child(self.job)
        self._learn(hello)
        for place in range(self.job.children):
            self._open_lane(child if place == 0 else None)
        self._tasks.append(asyncio.create_task(self._help_out()))

    async def run(self, sample: Sample, *, urgent: bool = False) -> Attempt:
        """In turn, or, where someone is waiting for it, before all that nobody waits for."""
        asked = Asked(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL), asyncio.get_running_loop().create_future())
        if urgent:
            self._backlog.put_first([asked])
        else:
            self._backlog.put(asked)
        return await asked.answer

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "Runner":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _learn(self, hello: Hello) -> None:
        self.name = hello.name
        if hello.is_async:
            self._window = Window(max(1, self.job.calls // self.job.children))
            self.slots = self._window.size * self.job.children

    async def _help_out(self) -> None:
        while True:
            await asyncio.sleep(PATIENCE)
            self._tasks = [task for task in self._tasks if not task.done()]
            stalled = sum(service.is_stalled for service in self._services)
            if stalled == self._lanes < 2 * self.job.children and not self._backlog.is_empty():
                self._open_lane(None)

    def _open_lane(self, child: Child | None) -> None:
        self._lanes += 1
        self._tasks.append(asyncio.create_task(self._lane(child)))

    def _has_spare(self) -> bool:
        return self._lanes > self.job.children

    async def _lane(self, child: Child | None) -> None:
        """One child after the other, until there are more than the job says."""
        while True:
            try:
                await self._serve(child or (await start_child(self.job))[0])
            except StepwellError as why:
                if not self._has_spare():
                    await self._fail_one(f"no process can be had for it: {why}")
            if self._has_spare():
                self._lanes -= 1
                return
            child = None

    async def _serve(self, child: Child) -> None:
        service = Service(child, self._backlog, self._window, timeout=self.job.timeout, may_leave=self._has_spare)
        self._services.add(service)
        try:
            await service.run()
        finally:
            self._services.discard(service)

    async def _fail_one(self, why: str) -> None:
        """Rather one error a try than samples that wait without end."""
        for asked in await self._backlog.take(1):
            asked.tell(Attempt(JudgementOutcome.ERROR, why=why))
