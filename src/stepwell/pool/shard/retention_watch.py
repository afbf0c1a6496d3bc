"""Removes what is too old, now and then, as long as the shard runs."""

import asyncio
from collections.abc import Awaitable, Callable

from stepwell.errors import PoolUnavailable

RETENTION_INTERVAL = 3600.0
"""Seconds. Data is removed so much later than it is due, at most."""


class RetentionWatch:
    def __init__(self, remove_overdue: Callable[[], Awaitable[object]], interval: float = RETENTION_INTERVAL) -> None:
        self.interval = interval
        self._remove_overdue = remove_overdue
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """At once, and then after each interval. Doing it again is harmless."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                await self._remove_overdue()
            except PoolUnavailable:  # the shard answers nothing any more
                return
            await asyncio.sleep(self.interval)
