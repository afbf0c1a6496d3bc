"""Sessions: real gateways and the fake engine, over real HTTP; the pool's shards in memory."""

import asyncio
import time
from typing import Any

import aiohttp

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.sessions import SESSION
from tests.integration.gateway.test_blackbox import HELLO, post

CHAT = "v1/chat/completions"


def live_pool(idle: float | None = 0.3, **more: Any) -> LocalPool:
    return LocalPool(clock=time.monotonic, session_idle=idle, **more)


async def open_session(http: aiohttp.ClientSession, **wanted: Any) -> str:
    status, opened = await post(http, "/init_trajectory", {"session": True, **wanted})
    assert status == 200, opened
    assert opened["prompt_uid"] == f"session@{opened['trajectory_uid']}"
    return f"/{opened['trajectory_uid']}/{opened['prompt_uid']}"


def trajectories(pool: LocalPool) -> list[Any]:
    """Those that are held, oldest first."""
    services = pool.transport.services.values()
    held = [trajectory for service in services for trajectory in service.pool.state.trajectories.values()]
    return sorted(held, key=lambda trajectory: trajectory.group.opened_at)


async def test_an_idle_session_ends_by_itself_and_goes_on_in_a_successor(engine: FakeEngine) -> None:
    pool = live_pool()
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        path = await open_session(http, user="ann")
        assert (await post(http, f"{path}/{CHAT}", HELLO))[0] == 200
        await until(lambda: [found.completed for found in trajectories(pool)] == [True], "the idle end")
        assert (await post(http, f"{path}/{CHAT}", HELLO))[0] == 200
        await until(lambda: [found.completed for found in trajectories(pool)] == [True, True], "the second idle end")
    first, second = trajectories(pool)
    assert first.metadata == {SESSION: {"id": first.uid, "user": "ann"}, "ended_by": "idle"}
    assert second.metadata[SESSION] == {"id": first.uid, "user": "ann", "predecessor": first.uid}
    assert [len(found.steps) for found in (first, second)] == [1, 1]
    assert (await pool.stats()).sessions.ended_idle == 2


async def test_a_session_with_a_call_in_flight_is_not_idle(engine: FakeEngine) -> None:
    pool = live_pool(0.6)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        path = await open_session(http)
        engine.faults = Faults(delay_s=1.6)
        assert (await post(http, f"{path}/{CHAT}", HELLO))[0] == 200
        engine.faults = Faults()
        assert (await post(http, f"{path}/{CHAT}", HELLO))[0] == 200
        await until(lambda: sum(len(found.steps) for found in trajectories(pool)) == 2, "both steps")
    assert [len(found.steps) for found in trajectories(pool)] == [2]


async def test_two_gateways_serve_one_session_and_lose_no_step(engine: FakeEngine) -> None:
    pool = live_pool(shards=2)
    other = LocalPool(transport=lambda _: pool.transport, shards=2)  # type: ignore[arg-type]
    async with (
        serve_gateway(pool, [engine.url]) as first,
        serve_gateway(other, [engine.url]) as second,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(f"{first}/init_trajectory", json={"session": True}) as answer:
            opened = await answer.json()
        path = f"/{opened['trajectory_uid']}/{opened['prompt_uid']}/{CHAT}"

        async def call(gateway: str, text: str) -> int:
            body = {**HELLO, "messages": [{"role": "user", "content": text}]}
            async with http.post(gateway + path, json=body) as reply:
                return reply.status

        for turn in range(3):
            calls = [call(gateway, f"{turn} {n}") for n, gateway in enumerate((first, second) * 3)]
            assert await asyncio.gather(*calls) == [200] * 6
            ended = turn + 1
            await until(
                lambda ended=ended: [found.completed for found in trajectories(pool)] == [True] * ended,  # type: ignore[misc]
                "the idle end",
            )
        held = trajectories(pool)
    assert [len(found.steps) for found in held] == [6, 6, 6]
    assert [found.metadata[SESSION].get("predecessor") for found in held] == [None, *(f.uid for f in held[:-1])]


async def test_feedback_at_the_base_url_is_for_the_trajectory_that_the_session_is_in(engine: FakeEngine) -> None:
    pool = live_pool()
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        path = await open_session(http)
        await post(http, f"{path}/{CHAT}", HELLO)
        await until(lambda: trajectories(pool)[0].completed, "the idle end")
        await post(http, f"{path}/{CHAT}", HELLO)
        assert await post(http, f"{path}/feedback", {"value": 0.5}) == (200, {"status": "counted"})
    assert [found.reward for found in trajectories(pool)] == [None, 0.5]


async def test_what_no_session_may_be_is_refused(engine: FakeEngine) -> None:
    async with serve_gateway(live_pool(), [engine.url]) as url, aiohttp.ClientSession(url) as http:
        for wanted in ({"session": True, "prompt_uid": "p"}, {"session": True, "group_size": 2}):
            assert (await post(http, "/init_trajectory", wanted))[0] == 400
        assert (await post(http, "/init_trajectory", {"session": True, "trajectory_uid": "t" * 128}))[0] == 400
        assert (await post(http, "/init_trajectory", {"prompt_uid": "session@t"}))[0] == 400


async def test_a_new_session_is_answered_while_the_pool_is_full_and_is_not_recorded(engine: FakeEngine) -> None:
    pool = live_pool(max_queue_size=1, overflow=Overflow.REFUSE)
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        await post(http, "/init_trajectory", {"trajectory_uid": "t", "prompt_uid": "p"})
        for stream in (False, True):
            async with http.post(f"/s/session@s/{CHAT}", json={**HELLO, "stream": stream}) as answer:
                assert answer.status == 200
                assert b"[DONE]" in await answer.read() or not stream
        async with http.get("/metrics") as metrics:
            assert 'stepwell_calls_unrecorded_total{cause="pool"} 2.0' in await metrics.text()
    assert [found.uid for found in trajectories(pool)] == ["t"]
