"""One request serves all who wait for its answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class Coalescer:
    """A call made at most once at a time, and no oftener than `every` seconds, for however many wait for it.

    Whoever awaits `fresh` gets a call that began afterwards: those who come while one runs share the next. The call
    leaves its result where they look for it, and does not fail.
    """

    def __init__(self, call: Callable[[], Awaitable[None]], *, every: float = 0.0) -> None:
        self._call = call
        self._every = every
        self._next: asyncio.Event | None = None
        self._calling: asyncio.Task[None] | None = None
        self._called_at = 0.0

    async def fresh(self) -> None:
        if self._next is None:
            self._next = asyncio.Event()
        if self._calling is None:
            self._calling = asyncio.create_task(self._serve())
        await self._next.wait()

    def close(self) -> None:
        """Lets go of all who wait."""
        if self._calling is not None:
            self._calling.cancel()
        self._release(self._next)

    async def _serve(self) -> None:
        served = self._next
        try:
            while self._next is not None:
                await asyncio.sleep(self._called_at + self._every - time.monotonic())
                served, self._next = self._next, None
                self._called_at = time.monotonic()
                await self._call()
                served.set()
        finally:
            self._calling = None
            self._release(served)
            self._release(self._next)

    def _release(self, waiting: asyncio.Event | None) -> None:
        if waiting is not None:
            waiting.set()
