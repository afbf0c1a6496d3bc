"""Which engine gets the next call. Knows the engines and how they are; sends nothing.

Healthy engines first, as the routing chooses. While there are none but some are paused, a call waits: a weight update
must not be seen by agents. Only where all are down are those tried that are down. No call gets the same engine twice.
"""

import asyncio
import contextlib
from collections.abc import Collection

from stepwell.engines.replica import EngineReplica, EngineState
from stepwell.engines.routing import Routing
from stepwell.errors import EngineUnavailable

HOLD_TIMEOUT = 600.0
"""Seconds a call waits for paused engines."""
RESUME_TOGETHER = 0.2
"""Seconds a waiting call leaves to the other engines to resume too, lest all that waited fall on the first one."""


class EngineSelector:
    def __init__(self, routing: Routing) -> None:
        self.engines: list[EngineReplica] = []
        self._routing = routing
        self._healthy: list[EngineReplica] = []
        self._changed = asyncio.Event()

    def add(self, engine: EngineReplica) -> None:
        self.engines.append(engine)
        self.note_change()

    def remove(self, engine: EngineReplica) -> None:
        self.engines.remove(engine)
        self.note_change()

    def note_change(self) -> None:
        """An engine's state is another."""
        self._healthy = [engine for engine in self.engines if engine.state is EngineState.HEALTHY]
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns once an engine came, went, or changed its state."""
        await self._changed.wait()

    async def next(self, sticky: str, tried: Collection[EngineReplica]) -> EngineReplica | None:
        """An engine that was not tried yet; None once there is none."""
        if self._healthy and not tried:
            return self._routing.choose(self._healthy, sticky)
        while self._must_wait(tried):
            await self._resumed(tried)
        left = self._left(tried, EngineState.HEALTHY) or self._left(tried, EngineState.DOWN)
        return self._routing.choose(left, sticky) if left else None

    def _left(self, tried: Collection[EngineReplica], state: EngineState) -> list[EngineReplica]:
        return [engine for engine in self.engines if engine.state is state and engine not in tried]

    def _must_wait(self, tried: Collection[EngineReplica]) -> bool:
        return not self._left(tried, EngineState.HEALTHY) and bool(self._left(tried, EngineState.PAUSED))

    async def _resumed(self, tried: Collection[EngineReplica]) -> None:
        try:
            async with asyncio.timeout(HOLD_TIMEOUT):
                while self._must_wait(tried):
                    await self.changed()
        except TimeoutError:
            names = ", ".join(engine.address for engine in self._left(tried, EngineState.PAUSED))
            raise EngineUnavailable(f"waited {HOLD_TIMEOUT:g} s for a paused engine to resume: {names}") from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESUME_TOGETHER):
                while self._left(tried, EngineState.PAUSED):
                    await self.changed()
