"""A pool that does not answer in time is asked again: an export of an hour must not end for a shard's restart."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stepwell.errors import PoolUnavailable

T = TypeVar("T")

TRIES = 6
PAUSE = 2.0
"""Seconds between two of them; each waits for some time by itself."""


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """What it gives, of something that is safe to repeat."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except PoolUnavailable:
            await asyncio.sleep(PAUSE)
    return await ask()
