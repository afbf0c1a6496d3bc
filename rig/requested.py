"""What a shard asks a gateway for, in tests that play the gateway."""

import asyncio

from stepwell.pool.slices.producing import TakeRequests

from rig.asked import asked
from stepwell.pool.api.transport import UNSEEN, flush_topic
from stepwell.pool.shard.service import ShardService


async def requested(shard: ShardService, gateway: str, *, has_told: bool = True) -> list[str]:
    """What it is asked for now. It shows itself."""
    found: list[str] = []
    while True:
        requests = await asked(shard, TakeRequests(gateway, 0.0, has_told))
        found += requests.trajectory_uids
        if requests.pause:
            return sorted(found)


async def next_requested(shard: ShardService, gateway: str) -> list[str]:
    """The same as soon as there is something."""
    topic, revision = flush_topic(gateway), UNSEEN
    async with asyncio.timeout(30.0):
        while not (found := await requested(shard, gateway)):
            news = await shard.wait_news(gateway, {topic: revision}, 30.0)
            revision = news[topic].revision
    return found
