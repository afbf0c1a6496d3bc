"""ChildLane: one child's life. Samples go to it, attempts come back, until it ends or must be killed.

- Every sample that was sent gets its attempt, or returns to its place in the queue.
- A child's death is attributed to the call that was running; other samples only lose time.
- A sample does not wait behind a stalled call: it returns to the queue at once.
"""

import asyncio
import math
import time
from collections.abc import Callable

from stepwell.pool.api.scoring import Attempt, JudgementOutcome
from stepwell.rewards.function import read_attempt
from stepwell.rewards.runner.child_process import EXIT_TIMEOUT, RewardChild
from stepwell.rewards.runner.messages import NO_CALL, with_output
from stepwell.rewards.runner.runner import Prefetch, QueuedSample, SampleQueue

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
