"""Looks for idle sessions, as long as there are open sessions."""

import asyncio
from collections.abc import Awaitable, Callable

from stepwell.errors import PoolUnavailable

TICKS = 4
"""How often a session is looked at within its idle time, at least."""


class SessionWatch:
    def __init__(self, idle: float | None, interval: float, end: Callable[[], Awaitable[bool]]) -> None:
        """`end` is called every `interval` seconds, or more often; it says if sessions are left. Without `idle`, no
        session ends so."""
        self._tick = None if idle is None else min(interval, idle / TICKS)
        self._end = end
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Doing it again is harmless."""
        if self._tick is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(self._tick))

    async def _watch(self, tick: float) -> None:
        are_left = True
        while are_left:
            await asyncio.sleep(tick)
            try:
                are_left = await self._end()
            except PoolUnavailable:  # the shard answers nothing any more
                return
