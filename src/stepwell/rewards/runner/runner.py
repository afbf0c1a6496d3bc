"""RewardRunner: calls a reward function in processes that can be killed; returns an Attempt for every sample.

- The function's code never runs in this process.
- A call ends in a score, an error or a timeout, whatever the function does. A child that ends is replaced.
- There are as many children as the job says. If the calls of all children have stalled and samples wait, there is one
  more, up to twice as many.
- A child gets several samples in advance if the function is fast. Every sample that was sent gets its attempt, or
  returns to its place in the queue; it does not wait behind a stalled call.
- A child's death is attributed to the call that was running; other samples only lose time.
"""

import asyncio
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepwell.errors import StepwellError
from stepwell.pool.api.scoring import Attempt, JudgementOutcome
from stepwell.rewards.function import read_attempt
from stepwell.rewards.runner.child_process import EXIT_TIMEOUT, RewardChild, start_child
from stepwell.rewards.runner.messages import NO_CALL, Job, with_output
from stepwell.rewards.sample import Sample

LOOKAHEAD = 0.005
"""Seconds of fast calls that a child gets in advance."""
MOST_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class QueuedSample:
    message: bytes
    """The pickled sample."""
    attempt: "asyncio.Future[Attempt]"
    """Already done if the caller was cancelled."""
    sent_at: float = 0.0
    deaths: int = 0
    """How often a child died while it held the sample and no call was running."""

    def finish(self, attempt: Attempt) -> None:
        if not self.attempt.done():
            self.attempt.set_result(attempt)


class SampleQueue:
    """Oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedSample] = deque()
        self._not_empty = asyncio.Event()

    def is_empty(self) -> bool:
        return not self._waiting

    def put(self, sample: QueuedSample) -> None:
        self._waiting.append(sample)
        self._not_empty.set()

    def put_first(self, samples: Iterable[QueuedSample]) -> None:
        """Puts the samples in this order, before all others."""
        self._waiting.extendleft(reversed([*samples]))
        self._not_empty.set()

    async def take(self, count: int) -> list[QueuedSample]:
        """Up to `count` samples, as soon as there is one. Samples whose caller was cancelled are dropped."""
        while True:
            await self._not_empty.wait()
            taken: list[QueuedSample] = []
            while self._waiting and len(taken) < count:
                sample = self._waiting.popleft()
                if not sample.attempt.done():
                    taken.append(sample)
            if not self._waiting:
                self._not_empty.clear()
            if taken:
                return taken


class Prefetch:
    """How many samples a child may hold. All children of a function share it, so a new child starts with what was
    learnt."""

    def __init__(self, concurrent_calls: int | None = None) -> None:
        """An async function has a fixed number; for a plain one (None), the number grows with its speed."""
        self.size = concurrent_calls or 1
        self.is_async = concurrent_calls is not None

    @property
    def is_fast(self) -> bool:
        """Whether the calls of a plain function are so short that a child holds several samples."""
        return not self.is_async and self.size > 1

    def learn(self, seconds: float) -> None:
        """Learns from the duration of a call. One call says little (its process may have waited for a CPU): the number
        at most doubles or halves."""
        if not self.is_async:
            wanted = int(LOOKAHEAD / max(seconds, 1e-6))
            self.size = max(1, self.size // 2, min(self.size * 2, MOST_AT_ONCE, wanted))


CANCEL_TIMEOUT = 2.0
"""Seconds beyond its timeout in which an async call must react to its cancellation; else it blocks the event loop."""
STALLED_AFTER = 0.1
"""Seconds after which a call counts as stalled: many times what all prefetched calls were expected to take."""
MOST_DEATHS = 3


class ChildLane:
    def __init__(
        self,
        child: RewardChild,
        queue: SampleQueue,
        prefetch: Prefetch,
        *,
        timeout: float,
        may_leave: Callable[[], bool],
    ) -> None:
        """Begins a lane. After a stalled call, `may_leave` says whether another child has taken this one's place."""
        self.is_stalled = False
        """Whether the running call has stalled; the child gets no samples until that call ends."""
        self._child = child
        self._queue = queue
        self._prefetch = prefetch
        self._timeout = timeout
        self._may_leave = may_leave
        self._sent: dict[int, QueuedSample] = {}
        """The samples by number, in the order in which they were sent."""
        self._last_number = 0
        self._answered_at = 0.0
        self._has_room = asyncio.Event()
        self._overdue: int | None = None
        self._is_leaving = False

    async def run(self) -> None:
        """Runs until the child has ended."""
        reading, sending = asyncio.create_task(self._read()), asyncio.create_task(self._send())
        tasks = (reading, sending, asyncio.create_task(self._watch()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.is_stalled = False
            sending.cancel()
            if self._overdue is not None or self._is_leaving:
                self._child.kill()
                await asyncio.wait([reading], timeout=EXIT_TIMEOUT)
            self._settle(await self._child.end(), self._child.output)
        finally:
            for task in tasks:
                task.cancel()
            await self._child.close()

    async def _send(self) -> None:
        while True:
            while self._room() <= 0:
                self._has_room.clear()
                await self._has_room.wait()
            taken = await self._queue.take(self._room())
            now = time.monotonic()
            numbered = list(enumerate(taken, self._last_number + 1))
            self._last_number += len(taken)
            for number, queued in numbered:
                queued.sent_at = now
                self._sent[number] = queued
            try:
                await self._child.send((number, queued.message) for number, queued in numbered)
            except OSError:
                return

    async def _read(self) -> None:
        while not self._is_leaving:
            try:
                number, attempt, is_leaving = read_attempt(await self._child.receive())
            except (EOFError, OSError, ValueError):
                return
            self._is_leaving = is_leaving or (self.is_stalled and self._may_leave())
            self.is_stalled = False
            self._answered_at = time.monotonic()
            queued = self._sent.pop(number, None)
            if queued is not None:
                queued.finish(attempt)
            self._prefetch.learn(attempt.seconds)
            self._has_room.set()

    async def _watch(self) -> None:
        """Watches until the oldest call exceeds its timeout. All calls have the same timeout, so no other is due
        earlier."""
        while self._overdue is None:
            _, deadline = self._first_deadline()
            await asyncio.sleep(min(STALLED_AFTER, deadline - time.monotonic()))
            number, deadline = self._first_deadline()
            if time.monotonic() >= deadline:
                self._overdue = number
            elif not self._prefetch.is_async:
                self._detect_stall()

    def _detect_stall(self) -> None:
        running = self._sent.get(self._child.running_call.read())
        if running is None or time.monotonic() - running.sent_at < STALLED_AFTER:
            return
        if len(self._sent) > 1:
            self._withdraw_waiting()
        self.is_stalled = self.is_stalled or self._prefetch.is_fast

    def _withdraw_waiting(self) -> None:
        """Returns the samples behind the running call to the queue; the child skips them."""
        running = self._child.running_call.withdraw(self._last_number)
        behind = [number for number in self._sent if number > running]
        self._queue.put_first([self._sent.pop(number) for number in behind])

    def _room(self) -> int:
        return 0 if self.is_stalled else self._prefetch.size - len(self._sent)

    def _first_deadline(self) -> tuple[int, float]:
        if not self._sent:
            return NO_CALL, math.inf
        number = next(iter(self._sent))
        sent_at = self._sent[number].sent_at
        if self._prefetch.is_async:
            return number, sent_at + self._timeout + CANCEL_TIMEOUT
        return number, max(sent_at, self._answered_at) + self._timeout

    def _settle(self, exit_text: str, output: str) -> None:
        running = self._child.running_call.read()
        if self._overdue is not None:
            culprit = running if self._prefetch.is_async and running in self._sent else self._overdue
            why = with_output(f"it took longer than {self._timeout:g} s and was killed", output)
            self._fail([culprit], JudgementOutcome.TIMEOUT, why)
        elif self._is_leaving:
            pass  # the lane killed it, whatever was running
        elif running in self._sent:
            self._fail([running], JudgementOutcome.ERROR, with_output(f"it died: {exit_text}", output))
        else:
            numbers = self._count_deaths()
            self._fail(numbers, JudgementOutcome.ERROR, with_output(f"its process died: {exit_text}", output))
        self._queue.put_first(self._sent.values())

    def _count_deaths(self) -> list[int]:
        """The samples to give up: no call was running, so all are called again unless this happened too often."""
        for queued in self._sent.values():
            queued.deaths += 1
        return [number for number, queued in self._sent.items() if queued.deaths >= MOST_DEATHS]

    def _fail(self, numbers: list[int], outcome: JudgementOutcome, why: str) -> None:
        now = time.monotonic()
        for number in numbers:
            if (queued := self._sent.pop(number, None)) is not None:
                queued.finish(Attempt(outcome, why=why, seconds=now - queued.sent_at))


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
