"""One child's life: samples go to it, attempts come back, until it ends or must be ended.

What always holds: every sample that went in is told its attempt or goes back to the backlog, in its place; a child's
death is put down to the call that was running, and costs no other sample more than time; no sample waits long behind
another one's call, for what is behind a stalled call goes back at once.
"""

import asyncio
import math
import time
from collections.abc import Callable

from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.rewards.attempt import Attempt, read_attempt
from stepwell.rewards.sandbox.child_process import LAST_WORDS, Child
from stepwell.rewards.sandbox.messages import read_frame
from stepwell.rewards.sandbox.output import with_printed
from stepwell.rewards.sandbox.prefetch import Window
from stepwell.rewards.sandbox.queue import Asked, Backlog
from stepwell.rewards.sandbox.running_call import NOBODY

GRACE = 2.0
"""Seconds an async call gets beyond its time to be cancelled; after that, it must be keeping the event loop."""
PATIENCE = 0.1
"""Seconds after which a call is stalled: many times what all that a child holds was expected to take."""
MOST_DEATHS = 3


class Service:
    def __init__(
        self, child: Child, backlog: Backlog, window: Window, *, timeout: float, may_leave: Callable[[], bool]
    ) -> None:
        """A child that comes back from a stalled call is asked whether it may leave, its place having been filled."""
        self.is_stalled = False
        """Whether the call that is running is; it is given nothing until that ends."""
        self._child = child
        self._backlog = backlog
        self._window = window
        self._timeout = timeout
        self._may_leave = may_leave
        self._under_way: dict[int, Asked] = {}
        """By number, in the order in which they were sent."""
        self._sent = 0
        self._answered_at = 0.0
        self._has_room = asyncio.Event()
        self._overdue: int | None = None
        self._is_leaving = False

    async def run(self) -> None:
        """Until the child is no more."""
        reading, sending = asyncio.create_task(self._read()), asyncio.create_task(self._send())
        tasks = (reading, sending, asyncio.create_task(self._watch()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.is_stalled = False
            sending.cancel()
            if self._overdue is not None or self._is_leaving:
                self._child.kill()
                await asyncio.wait([reading], timeout=LAST_WORDS)
            self._settle(await self._child.end(), self._child.printed)
        finally:
            for task in tasks:
                task.cancel()
            await self._child.close()

    async def _send(self) -> None:
        while True:
            while self._room() <= 0:
                self._has_room.clear()
                await self._has_room.wait()
            taken = await self._backlog.take(self._room())
            now = time.monotonic()
            numbered = list(enumerate(taken, self._sent + 1))
            self._sent += len(taken)
            for number, asked in numbered:
                asked.sent_at = now
                self._under_way[number] = asked
            try:
                await self._child.send((number, asked.message) for number, asked in numbered)
            except OSError:
                return

    async def _read(self) -> None:
        while not self._is_leaving:
            try:
                number, attempt, is_leaving = read_attempt(await read_frame(self._child.reader))
            except (EOFError, OSError, ValueError, TypeError):
                return
            self._is_leaving = is_leaving or (self.is_stalled and self._may_leave())
            self.is_stalled = False
            self._answered_at = time.monotonic()
            asked = self._under_way.pop(number, None)
            if asked is not None:
                asked.tell(attempt)
            self._window.learn(attempt.seconds)
            self._has_room.set()

    async def _watch(self) -> None:
        """Until the oldest call is over its time; all have the same, so no other one can be before it."""
        while self._overdue is None:
            _, deadline = self._first_deadline()
            await asyncio.sleep(min(PATIENCE, deadline - time.monotonic()))
            number, deadline = self._first_deadline()
            if time.monotonic() >= deadline:
                self._overdue = number
            elif not self._window.is_async:
                self._look_for_stall()

    def _look_for_stall(self) -> None:
        running = self._under_way.get(self._child.cell.read())
        if running is None or time.monotonic() - running.sent_at < PATIENCE:
            return
        if len(self._under_way) > 1:
            self._take_back()
        self.is_stalled = self._window.is_fast

    def _take_back(self) -> None:
        """What is behind the running call: the child will pass over it."""
        running = self._child.cell.withdraw(self._sent)
        behind = [number for number in self._under_way if number > running]
        self._backlog.put_first([self._under_way.pop(number) for number in behind])

    def _room(self) -> int:
        return 0 if self.is_stalled else self._window.size - len(self._under_way)

    def _first_deadline(self) -> tuple[int, float]:
        if not self._under_way:
            return NOBODY, math.inf
        number = next(iter(self._under_way))
        sent_at = self._under_way[number].sent_at
        if self._window.is_async:
            return number, sent_at + self._timeout + GRACE
        return number, max(sent_at, self._answered_at) + self._timeout

    def _settle(self, how_it_ended: str, printed: str) -> None:
        running = self._child.cell.read()
        if self._overdue is not None:
            culprit = running if self._window.is_async and running in self._under_way else self._overdue
            why = with_printed(f"it took longer than {self._timeout:g} s and was killed", printed)
            self._tell([culprit], JudgementOutcome.TIMEOUT, why)
        elif self._is_leaving:
            pass  # it was ended from here, whatever was running then
        elif running in self._under_way:
            self._tell([running], JudgementOutcome.ERROR, with_printed(f"it died: {how_it_ended}", printed))
        else:
            self._tell(
                self._unlucky(), JudgementOutcome.ERROR, with_printed(f"its process died: {how_it_ended}", printed)
            )
        self._backlog.put_first(self._under_way.values())

    def _unlucky(self) -> list[int]:
        """No call was running: they are called again, unless that has come to nothing too often."""
        for asked in self._under_way.values():
            asked.deaths += 1
        return [number for number, asked in self._under_way.items() if asked.deaths >= MOST_DEATHS]

    def _tell(self, numbers: list[int], outcome: JudgementOutcome, why: str) -> None:
        now = time.monotonic()
        for number in numbers:
            if (asked := self._under_way.pop(number, None)) is not None:
                asked.tell(Attempt(outcome, why=why, seconds=now - asked.sent_at))
