"""D4: a call whose trajectory the pool cannot be asked for is answered, and the pool decides about its step later."""

import asyncio

import aiohttp

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.gateway.app import GatewayLimits
from stepwell.gateway.call_resolver import ASK_PAUSE, UNCHECKED, CallResolver
from stepwell.pool.api.producing import Registration, TrajectoryRef

CHAT = "v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
OPENED = {"trajectory_uid": "t", "prompt_uid": "p"}
"""A gateway that was given the uid does not know the channel, so it asks the pool at the first call."""
LIMITS = GatewayLimits(ask_timeout=0.05)


async def say(http: aiohttp.ClientSession, path: str = "/t/p") -> int:
    async with http.post(f"{path}/{CHAT}", json=HELLO) as answer:
        await answer.read()
        return answer.status


async def metrics(http: aiohttp.ClientSession) -> str:
    async with http.get("/metrics") as answer:
        return await answer.text()


async def test_a_call_is_answered_while_the_pool_is_away_and_its_step_is_delivered_afterwards(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url], limits=LIMITS) as url, aiohttp.ClientSession(url) as http:
        await http.post("/init_trajectory", json=OPENED)
        pool.away = True
        assert [await say(http) for _ in range(3)] == [200] * 3
        assert "\nstepwell_unchecked_calls_total 3.0\n" in await metrics(http)
        pool.away = False
        async with http.post("/t/p/complete_trajectory", json={"reward": 1.0}) as ended:
            assert await ended.json() == {"status": "completed"}
    assert [step.step_index for step in pool.taken()] == [0, 1, 2]


async def test_a_pool_that_does_not_answer_is_asked_again_for_a_trajectory_after_a_pause() -> None:
    pool, now = LocalPool(), 0.0
    await pool.register_trajectory(Registration("t", "p", "validation"))
    resolver = CallResolver(pool, ask_timeout=0.5, clock=lambda: now)
    ref = TrajectoryRef("t", "p")
    pool.transport.shards_away.add("data_pool")
    assert await resolver.channel_of(ref) == UNCHECKED
    pool.transport.shards_away.clear()
    assert await resolver.channel_of(ref) == UNCHECKED
    now = ASK_PAUSE
    assert await resolver.channel_of(ref) == "validation"
    assert resolver.unchecked == 2


async def test_a_shard_that_answers_too_late_learns_who_serves_the_trajectory() -> None:
    pool = LocalPool()
    following = asyncio.create_task(pool.follow_flushes(lambda _: asyncio.sleep(0)))
    await pool.register_trajectory(Registration("t", "p"))
    pool.transport.shards_stopped.add("data_pool")
    assert await CallResolver(pool, ask_timeout=0.05).channel_of(TrajectoryRef("t", "p")) == UNCHECKED
    pool.transport.shards_stopped.clear()
    trajectory = pool.transport.services["data_pool"].pool.state.trajectories["t"]
    await until(lambda: len(trajectory.gateways or ()) == 1, "the shard to learn who serves the trajectory")
    following.cancel()


async def test_the_step_of_a_trajectory_that_nobody_opened_is_refused_and_counted(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url], limits=LIMITS) as url, aiohttp.ClientSession(url) as http:
        pool.away = True
        assert await say(http, "/nobody/p") == 200
        pool.away = False
        async with asyncio.timeout(30):
            while 'stepwell_lost_steps_total{cause="unknown"} 1.0' not in await metrics(http):
                await asyncio.sleep(0.02)


async def test_an_operator_may_have_such_calls_refused(engine: FakeEngine) -> None:
    pool = LocalPool(timeout=0.1)
    gateway = serve_gateway(pool, [engine.url], limits=LIMITS, answers_unchecked=False)
    async with gateway as url, aiohttp.ClientSession(url) as http:
        await http.post("/init_trajectory", json=OPENED)
        pool.away = True
        assert await say(http) == 503
        pool.away = False
        assert await say(http) == 200
