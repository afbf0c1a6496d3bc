"""Keeps a DataPool in existence: if Ray has lost its state and with it the pool, the pool is created again.

With a journal, it continues from there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.transport import ActorAway, ActorMissing, ActorTransport

log = logging.getLogger("stepwell.pool")

KEEP_INTERVAL = 5.0
"""Seconds between two looks whether all shards exist."""
ANSWER_TIMEOUT = 10.0


async def keep_pool(
    transport: ActorTransport,
    pool: str,
    create: Callable[[], Awaitable[None]],
    *,
    interval: float = KEEP_INTERVAL,
) -> None:
    """Until cancelled. A shard that is away is left alone: Ray restarts it."""
    while True:
        if missing := await _missing(transport, pool):
            log.warning("Ray has no %s; the pool is created", ", ".join(missing))
            await create()
        await asyncio.sleep(interval)


async def _missing(transport: ActorTransport, pool: str) -> list[str]:
    """The first shard names the others, whose number may change."""
    try:
        plan = await _plan(transport, pool)
    except ActorMissing:
        return [pool]
    missing = []
    for shard in () if plan is None else plan.shard_names()[1:]:
        try:
            await _plan(transport, shard)
        except ActorMissing:
            missing.append(shard)
    return missing


async def _plan(transport: ActorTransport, shard: str) -> PoolPlan | None:
    """None if the shard is away."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            plan: PoolPlan = await transport.call(shard, "plan", (), {})
            return plan
    except (ActorAway, PoolUnavailable, TimeoutError):
        return None
