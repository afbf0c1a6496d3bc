"""Answers of the pool's that all who watch share: however many they are, the pool is asked as if there were one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from stepwell.errors import PoolUnavailable

T = TypeVar("T")

FRESH = 1.0
"""Seconds for which an answer is passed on; longer, if it took the pool long."""
STALEST = 10.0
SHARE = 0.002
"""Of the pool's time, for each question."""
PATIENCE = 2.0


class SharedAnswer(Generic[T]):
    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None
        self._begun = 0.0
        self._good_until = 0.0

    async def get(self, *, fresh: bool = False) -> T:
        """The answer, perhaps a little old, unless it is to be fresh: asked for from now on. PoolUnavailable, soon, if
        there is none; the question goes on meanwhile."""
        since = time.monotonic() if fresh else 0.0
        while True:
            asking = self._question(since)
            begun = self._begun
            left = max(0.05, begun + PATIENCE - time.monotonic())
            done, _ = await asyncio.wait({asking}, timeout=left)
            if not done:
                raise PoolUnavailable(f"the pool has not answered for {time.monotonic() - begun:.0f} s")
            if begun >= since:
                return asking.result()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _question(self, since: float) -> asyncio.Task[T]:
        """The one under way, or the last if its answer still counts, or a new one."""
        now = time.monotonic()
        if self._asking is None or (self._asking.done() and (now >= self._good_until or self._begun < since)):
            self._begun = now
            self._asking = asyncio.create_task(self._asked())
        return self._asking

    async def _asked(self) -> T:
        try:
            answer = await self._ask()
        except PoolUnavailable:
            self._good_until = time.monotonic() + FRESH
            raise
        now = time.monotonic()
        self._good_until = now + min(STALEST, max(FRESH, (now - self._begun) / SHARE))
        return answer
