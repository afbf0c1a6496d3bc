"""The calls of this gateway whose steps the pool does not have yet. The pool is told of each before its answer ends,
so that it knows what is missing if the gateway dies."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.pool.api.producing import CallBegun, HeldCalls
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

ANNOUNCE_WAIT = 2.0
"""Seconds that the end of an answer waits until the pool knows of the call. While the pool is away it does not wait."""
LATE = 0.5
"""Seconds of it after which shards are told that an answer waits. With GAP (gateway_roster.py) not more than all."""
AWAY = 10.0
"""Seconds for which no answer waits, after one has waited in vain."""


@dataclass(slots=True, eq=False)
class BookedCall:
    begun: CallBegun
    announcing: asyncio.Task[bool]
    is_recorded: bool = False


class CallBook:
    def __init__(self, pool: PoolClient, *, announce_wait: float = ANNOUNCE_WAIT) -> None:
        self.unannounced = 0
        """Answers that ended before the pool knew of their call."""
        self._pool = pool
        self._announce_wait = announce_wait
        self._calls: dict[str, BookedCall] = {}
        """The calls by uid."""
        self._away_until = -math.inf
        """The pool did not take the last announcement that an answer waited for."""
        self._waiting: dict[str, float] = {}
        """The times since when the end of an answer waits, by uid."""
        self._missed = 0
        """Announcements that the pool has not taken, of a call or of its end, and unannounced answers."""
        self._telling: set[asyncio.Task[Any]] = set()

    def begin(self, begun: CallBegun) -> None:
        """An engine is asked."""
        self._calls[begun.uid] = BookedCall(begun, asyncio.create_task(self._announce(begun)))

    async def given_again(self, begun: CallBegun) -> None:
        """Waits until the pool knows that an answer is given once more, so that no later try passes for the one that
        was read. While the pool is away, it does not wait."""
        if self._is_away():
            return
        announcing = asyncio.create_task(self._announce(begun))
        self._telling.add(announcing)
        announcing.add_done_callback(self._telling.discard)
        self._pool.hurry()
        await asyncio.wait({announcing}, timeout=self._announce_wait)

    async def announced(self, uid: str) -> None:
        """Waits, before the end of an answer, until its call is announced."""
        booked = self._calls.get(uid)
        if booked is None:
            return
        if not booked.announcing.done() and not self._is_away():
            self._pool.hurry()
            self._waiting[uid] = time.monotonic()
            try:
                await asyncio.wait({booked.announcing}, timeout=self._announce_wait)
            finally:
                del self._waiting[uid]
        if not booked.announcing.done() or not booked.announcing.result():
            self._away_until = time.monotonic() + AWAY
            self.unannounced += 1
            self._missed += 1

    def recorded(self, steps: Sequence[Step]) -> None:
        """Notes that the steps of the call are in the outbox."""
        for step in steps:
            if (booked := self._calls.get(step.uid)) is not None:
                booked.is_recorded = True

    def answered(self, uid: str) -> None:
        """The call is over. Without a step, the pool waits for none."""
        booked = self._calls.get(uid)
        if booked is not None and not booked.is_recorded:
            self._end(uid, is_lost=False)

    def settled(self, step: Step) -> None:
        """The pool has the step. The end of the answer still waits until it has the call, by which it knows repeats."""
        booked = self._calls.get(step.uid)
        if booked is not None:
            booked.announcing.add_done_callback(lambda _: self._calls.pop(step.uid, None))

    def refused(self, step: Step, *, is_lost: bool) -> None:
        """The pool does not get the step. It is lost if the gateway has given it up."""
        self._end(step.uid, is_lost=is_lost)

    def lost_of(self, trajectory_uid: str) -> None:
        """Some recorded steps of a trajectory are lost. The pool hears of those that come nevertheless."""
        for uid, booked in list(self._calls.items()):
            if booked.is_recorded and booked.begun.trajectory_uid == trajectory_uid:
                self._end(uid, is_lost=True)

    def held(self) -> HeldCalls:
        oldest = time.monotonic() - LATE
        is_late = self._is_away() or any(since < oldest for since in self._waiting.values())
        return HeldCalls([booked.begun for booked in self._calls.values()], self._missed, is_late)

    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until

    async def _announce(self, begun: CallBegun) -> bool:
        try:
            await self._pool.begin_call(begun)
        except Exception as failure:  # noqa: BLE001 - the agent gets its answer; the pool asks for all calls later
            log.debug("the pool does not take the announcement of a call: %s", failure)
            self._missed += 1
            return False
        self._away_until = -math.inf
        return True

    def _end(self, uid: str, *, is_lost: bool) -> None:
        booked = self._calls.pop(uid, None)
        if booked is not None:
            ending = asyncio.create_task(self._tell_end(booked.begun, is_lost))
            self._telling.add(ending)
            ending.add_done_callback(self._telling.discard)

    async def _tell_end(self, begun: CallBegun, is_lost: bool) -> None:
        try:
            await self._pool.end_call(begun.trajectory_uid, begun.prompt_uid, begun.uid, is_lost=is_lost)
        except Exception as failure:  # noqa: BLE001 - if the gateway dies, a rollout is marked that lacks nothing
            log.debug("the pool does not take the end of a call: %s", failure)
            self._missed += 1
