"""Keeps a DataPool in existence: if Ray has lost its state and with it the pool, the pool is created again.

With a journal, it continues from there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stepwell.pool.api.transport import ActorAway, ActorMissing, ActorTransport

log = logging.getLogger("stepwell.pool")

KEEP_INTERVAL = 5.0
"""Seconds between two looks whether all shards exist."""
ANSWER_TIMEOUT = 10.0


async def keep_pool(
    transport: ActorTransport,
    shards: Sequence[str],
    create: Callable[[], Awaitable[None]],
    *,
    interval: float = KEEP_INTERVAL,
) -> None:
    """Until cancelled. A shard that is away is left alone: Ray restarts it."""
    while True:
        if missing := [shard for shard in shards if await _is_missing(transport, shard)]:
            log.warning("Ray has no %s; the pool is created", ", ".join(missing))
            await create()
        await asyncio.sleep(interval)


async def _is_missing(transport: ActorTransport, shard: str) -> bool:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            await transport.call(shard, "plan", (), {})
    except ActorMissing:
        return True
    except (ActorAway, TimeoutError):
        pass
    return False
