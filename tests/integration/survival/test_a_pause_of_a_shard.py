"""D17: after a shard stood still, a completion asks the gateways that serve its rollout, and no others."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from stepwell.pool.actors import start_pool

from rig.actors import pid_of
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link_messages import GatheringTransport
from stepwell.pool.shard.gateway_roster import GAP
from stepwell.pool.shard.ray_transport import RayTransport

GATEWAYS, ROLLOUTS = 8, 16
"""And half of the rollouts are completed before the pause."""
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
STOPPED = GAP + 0.5
"""Seconds."""


class CountingRayTransport(RayTransport):
    """Counts the messages to actors."""

    messages = 0

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.messages += 1
        return await super().call(actor, method, args, kwargs)


async def messages_of(counting: CountingRayTransport, http: aiohttp.ClientSession, rollouts: Sequence[str]) -> int:
    """How many it takes to complete these rollouts at once."""
    before = counting.messages

    async def complete(rollout: str) -> None:
        async with http.post(f"{rollout}/v1/complete_trajectory", json={"reward": 1.0}) as answer:
            assert answer.status == 200, await answer.text()

    await asyncio.gather(*map(complete, rollouts))
    return counting.messages - before


async def test_completions_after_a_pause_take_no_more_messages_than_before(namespace: str, engine: FakeEngine) -> None:
    start_pool(PoolPlan(), namespace)
    counting = CountingRayTransport(namespace)
    transport = GatheringTransport(counting)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        rollouts = []
        for _ in range(GATEWAYS):
            url = await stack.enter_async_context(
                serve_gateway(PoolClient("data_pool", transport=transport), [engine.url])
            )
            for _ in range(ROLLOUTS // GATEWAYS):
                async with http.post(f"{url}/init_trajectory", json={}) as answer:
                    opened = await answer.json()
                rollouts.append(f"{url}/{opened['trajectory_uid']}/{opened['prompt_uid']}")
                async with http.post(f"{rollouts[-1]}/v1/chat/completions", json=BODY) as answer:
                    assert answer.status == 200, await answer.text()
        usual = await messages_of(counting, http, rollouts[::2])
        shard = pid_of("data_pool", namespace)
        os.kill(shard, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED)
        finally:
            os.kill(shard, signal.SIGCONT)
        await PoolClient("data_pool", transport=transport).check()
        assert await messages_of(counting, http, rollouts[1::2]) < usual + ROLLOUTS
