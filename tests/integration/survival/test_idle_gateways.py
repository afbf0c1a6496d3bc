"""D17: gateways of one machine that nobody uses hardly ask a shard for anything."""

import asyncio
from contextlib import AsyncExitStack

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link_messages import GatheringTransport

GATEWAYS = 20
OBSERVED = 4.0
"""Seconds."""
MOST_MESSAGES = 5
"""A second, at a shard."""


class CountingLocalTransport(LocalTransport):
    calls = 0

    async def call(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return await super().call(*args, **kwargs)  # type: ignore[arg-type]


async def test_many_idle_gateways_on_one_link_ask_a_shard_less_than_five_times_a_second(engine: FakeEngine) -> None:
    pool = LocalPool(transport=CountingLocalTransport)
    link = GatheringTransport(pool.transport)
    async with AsyncExitStack() as stack:
        for _ in range(GATEWAYS):
            client = PoolClient(pool.plan.name, transport=link)
            await stack.enter_async_context(serve_gateway(client, [engine.url]))
        await until(lambda: pool.transport.calls >= 1, "the gateways to reach the pool")
        await asyncio.sleep(1.0)  # what they ask once, at their start
        before = pool.transport.calls
        await asyncio.sleep(OBSERVED)
        assert pool.transport.calls - before < MOST_MESSAGES * OBSERVED
