"""A canary with real Ray, two gateways and two engines of different versions."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

from stepwell.pool.actors import start_pool

from rig.actors import pid_of, wait_until_back
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from rig.waiting import until
from stepwell.engines.routing import SessionSplit
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import Canary, PolicyDecision
from stepwell.pool.client import PoolClient

CHAT = "/v1/chat/completions"
SHARE = 0.4
SESSIONS = 20


def test_sessions_are_split_stick_and_move_at_once_when_the_canary_ends(namespace: str, tmp_path: Path) -> None:
    start_pool(PoolPlan(shards=2, journal=str(tmp_path)), namespace)
    asyncio.run(run_canary(namespace))


async def run_canary(namespace: str) -> None:
    async with AsyncExitStack() as stack:
        old, new = [await stack.enter_async_context(FakeEngine()) for _ in range(2)]
        old.weight_version, new.weight_version = "6", "7"
        pools = [PoolClient("data_pool", namespace) for _ in range(3)]
        operator, urls = pools[2], [old.url, new.url]
        canary = Canary(7, (new.url,), SHARE, time.time())
        began = PolicyDecision(7, "canary", "guard", "it passed", time.time())
        await operator.decide(began, canary, 6)
        gateways = [await stack.enter_async_context(serve_gateway(pool, urls)) for pool in pools[:2]]
        await until(lambda: all(p.serving is not None and p.serving.canary == canary for p in pools[:2]), "the canary")

        agents = [await stack.enter_async_context(agent_of(gateways[n % 2])) for n in range(SESSIONS)]
        wanted = [SessionSplit(canary, []).is_canary(agent.path.split("/")[1]) for agent in agents]
        for _ in range(2):
            assert [await served_by(agent, new) for agent in agents] == wanted
        assert 0 < sum(wanted) < SESSIONS

        killed = pid_of("data_pool", namespace)
        os.kill(killed, signal.SIGKILL)
        wait_until_back("data_pool", namespace, killed)
        assert await operator.canary() == canary
        assert await operator.decisions() == [began]
        assert [await served_by(agent, new) for agent in agents] == wanted

        await operator.decide(PolicyDecision(7, "rollback", "ana", "it is rude", time.time()))
        decided = time.monotonic()
        await until(lambda: all(p.serving is not None and p.serving.canary is None for p in pools[:2]), "the rollback")
        assert time.monotonic() - decided < 5.0, "they are told, and do not look only now and then"
        assert [await served_by(agent, new) for agent in agents] == [False] * SESSIONS


async def served_by(agent: Agent, engine: FakeEngine) -> bool:
    before = engine.asked[CHAT]
    await agent.ask()
    return engine.asked[CHAT] > before


async def test_a_session_whose_side_is_down_is_served_by_the_other(two: tuple[FakeEngine, FakeEngine]) -> None:
    old, new = two
    old.weight_version, new.weight_version = "6", "7"
    pool = LocalPool()
    await pool.decide(PolicyDecision(7, "canary", "guard", "", 1.0), Canary(7, ("http://127.0.0.1:9",), 1.0, 1.0), 6)
    async with serve_gateway(pool, [old.url, "http://127.0.0.1:9"]) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        assert await agent.metric('stepwell_canary_served_by_other_total{side="canary"}') == 1.0
        seconds = await agent.metric("stepwell_canary_seconds")
        assert seconds is not None
        assert seconds > 1e9, "it began in 1970"
