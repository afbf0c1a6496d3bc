"""Looks for silent holders of leases, as long as there are leases."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from stepwell.pool.rules.heartbeats import LeaseHeartbeats

HEARTBEAT_TIMEOUT = 10.0
"""Seconds after its last heartbeat that a trainer is taken for dead."""
TICKS = 10
"""How often silent holders are looked for within that time."""


class LeaseWatch:
    def __init__(
        self, heartbeats: LeaseHeartbeats, timeout: float, end: Callable[[Sequence[str]], Awaitable[bool]]
    ) -> None:
        """`end` is called now and then with the leases of silent holders; it says whether leases are left."""
        self._heartbeats = heartbeats
        self._tick = timeout / TICKS
        self._end = end
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Doing it again is harmless."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """A time in which this process was stopped counts as little more than a tick."""
        are_left = True
        while are_left:
            began = time.monotonic()
            await asyncio.sleep(self._tick)
            silent = self._heartbeats.pass_time(min(time.monotonic() - began, 2 * self._tick))
            are_left = await self._end(silent)
