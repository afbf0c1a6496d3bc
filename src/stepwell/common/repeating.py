"""Work that goes on beside the serving, for as long as the dashboard lives."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

log = logging.getLogger("stepwell.dashboard")

AFTER_A_FAULT = 5.0
Look = Callable[[], Awaitable[float]]
"""One piece of work; gives the seconds to rest before the next."""


@contextlib.asynccontextmanager
async def repeating(*looks: Look) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_repeat(look)) for look in looks]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(look: Look) -> None:
    """A look names the failures it expects; any other is logged, and must not end the watching."""
    while True:
        try:
            rest = await look()
        except Exception:
            log.exception("the dashboard failed at %s", getattr(look, "__qualname__", look))
            rest = AFTER_A_FAULT
        await asyncio.sleep(rest)
