"""One engine as the gateway knows it: what it can do, how it is, which weights it has. Kept up to date by its watch.

What holds: an engine that is not probed is down, and one that was down is probed again before it gets a call.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from yarl import URL

from stepwell.common.coalescing import Coalescer
from stepwell.engines.engine import EngineFacts, EngineProbe
from stepwell.errors import EngineUnavailable

log = logging.getLogger("stepwell.gateway")

WATCH_INTERVAL = 0.5
PAUSED_WATCH_INTERVAL = 0.1
"""Seconds between two checks of a paused engine: calls wait for it."""
VERSION_INTERVAL = 0.02
"""Seconds between two questions for the weights' version, however many calls want to know."""


class EngineState(StrEnum):
    HEALTHY = "healthy"
    PAUSED = "paused"
    """For a weight update: it gets no new calls."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine at one moment, for those who look on."""

    address: str
    state: EngineState
    why: str
    """Why it is down; else empty."""
    in_flight: int
    weight_version: str | None
    facts: EngineFacts


class EngineReplica:
    """One replica. Compared by identity: the same address removed and added again is another engine."""

    def __init__(self, address: str, questions: EngineProbe, on_change: Callable[[], None]) -> None:
        self.address = address
        self.facts = EngineFacts()
        self.probed = False
        self.state = EngineState.DOWN
        self.why = "not probed yet"
        self.in_flight = 0
        """Calls sent and not yet answered to the end, those that wait for a connection among them."""
        self.weight_version: str | None = None
        """As the engine writes it."""
        self.version: int | None = None
        """The policy version, where the engine's own is a number."""
        self.version_checked_at = 0.0
        """Monotonic time at which the request began that last told the version."""
        self._questions = questions
        self._on_change = on_change
        self._checking = Coalescer(self._check)
        self._asking_version = Coalescer(self._ask_version, every=VERSION_INTERVAL)
        self._urls: dict[str, URL] = {}

    def url(self, path: str) -> URL:
        """Parsed once: paths are few, calls are many."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.address + path)
        return url

    def view(self) -> EngineView:
        return EngineView(self.address, self.state, self.why, self.in_flight, self.weight_version, self.facts)

    def set_down(self, why: str) -> None:
        self.probed = False
        self.weight_version = self.version = None
        self._set_state(EngineState.DOWN, why)

    async def check(self) -> None:
        """Find out how it is, and what it can do where that is not known; afterwards it is probed, or down."""
        await self._checking.fresh()

    async def version_after(self) -> int | None:
        """The version as told by a request that began after this call; None where the engine cannot tell."""
        if not self.facts.weight_info:
            return None
        asked_at = time.monotonic()
        await self._asking_version.fresh()
        return self.version if self.version_checked_at >= asked_at else None

    async def watch(self) -> None:
        """Check it again and again, until cancelled."""
        while True:
            await self.check()
            is_paused = self.state is EngineState.PAUSED
            await asyncio.sleep(PAUSED_WATCH_INTERVAL if is_paused else WATCH_INTERVAL)

    def close(self) -> None:
        self._checking.close()
        self._asking_version.close()

    async def _check(self) -> None:
        try:
            if not self.probed:
                self.facts = await self._questions.facts()
            await self._questions.check_health(self.facts)
        except EngineUnavailable as failure:
            self.set_down(str(failure))
            return
        self.probed = True
        if await self._is_paused():
            self._set_state(EngineState.PAUSED)
            return
        await self.version_after()  # after the pause, before new calls: then none of their tokens is older than it
        self._set_state(EngineState.HEALTHY)

    async def _is_paused(self) -> bool:
        """An engine that does not say is as it was."""
        told = await self._questions.is_paused() if self.facts.pause else False
        return self.state is EngineState.PAUSED if told is None else told

    async def _ask_version(self) -> None:
        asked_at = time.monotonic()
        told = await self._questions.weight_version()
        if told is not None:
            self.weight_version, self.version_checked_at = told, asked_at
            self.version = int(told) if told.isdecimal() else None

    def _set_state(self, state: EngineState, why: str = "") -> None:
        if (self.state, self.why) == (state, why):
            return
        self.state, self.why = state, why
        level = logging.WARNING if state is EngineState.DOWN else logging.INFO
        log.log(level, "engine %s is %s%s", self.address, state, why and f": {why}")
        self._on_change()
