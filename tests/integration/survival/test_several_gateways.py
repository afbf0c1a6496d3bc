"""D1: rollouts whose calls reach several gateways, which send in the background: none is empty, truncated or lost."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.pool.client import PoolClient

GATEWAYS, ROLLOUTS, MOST_CALLS = 4, 100, 6
CALL = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


async def test_a_rollout_over_several_gateways_is_completed_with_all_its_steps() -> None:
    chance, pool = random.Random(7), LocalPool(shards=2)
    asked: dict[str, int] = {}
    at_once = asyncio.Semaphore(16)

    async def roll_out(http: aiohttp.ClientSession, urls: list[str], number: int) -> str:
        async def post(path: str, body: object) -> dict[str, str]:
            async with http.post(f"{chance.choice(urls)}/{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
                said: dict[str, str] = await answer.json()
                return said

        async with at_once:
            ref = {"trajectory_uid": f"t{number}", "prompt_uid": f"p{number}"}
            await post("init_trajectory", ref)
            asked[ref["trajectory_uid"]] = chance.randint(1, MOST_CALLS)
            base = f"t{number}/p{number}/v1"
            for _ in range(asked[ref["trajectory_uid"]]):
                await post(f"{base}/chat/completions", CALL)
            return (await post(f"{base}/complete_trajectory", {"reward": 1.0}))["status"]

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls = []
        for _ in range(GATEWAYS):
            client = PoolClient(pool.plan.name, transport=pool.transport)
            urls.append(await stack.enter_async_context(serve_gateway(client, [engine.url])))
        statuses = await asyncio.gather(*(roll_out(http, urls, number) for number in range(ROLLOUTS)))
        batch = await pool.fetch_batch(ROLLOUTS, timeout=60.0)
    assert Counter(statuses) == {"completed": ROLLOUTS}
    assert Counter(batch.columns.trajectory_uids) == asked
    assert {step.reward for step in batch.steps() if step.is_last} == {1.0}
