"""The gateways, scraped for real."""

from typing import Any

import httpx

from rig.dashboard import MadeUpPool, serve_dashboard
from rig.fake_engine import FakeEngine
from rig.gateways import free_port, serve_gateway
from rig.local_pool import LocalPool
from tests.integration.dashboard.client import BEARER, KEY, eventually, get

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


async def test_calls_latencies_and_engines_are_seen() -> None:
    dashboard: dict[str, Any] = {"control_keys": [KEY], "gateway_interval": 0.05}
    async with (
        FakeEngine() as engine,
        serve_gateway(LocalPool(), [engine.url], control_keys=[KEY]) as gateway,
        serve_dashboard(MadeUpPool(8), gateways=[gateway], **dashboard) as url,
        httpx.AsyncClient(base_url=url, headers=BEARER) as client,
        httpx.AsyncClient(base_url=gateway, headers=BEARER) as agent,
    ):

        async def seen() -> dict[str, Any]:
            status = await get(client, "status")
            (shown,) = status["gateways"]
            return {**shown, "engines": status["engines"]}

        async def is_ready() -> bool:
            return bool((await seen())["ready"])

        async def is_counted() -> bool:
            return bool((await seen())["calls"] == 3)

        await eventually(is_ready, "the gateway to be seen ready")
        for _ in range(3):
            opened = (await agent.post("/init_trajectory", json={})).json()
            assert (await agent.post(f"{opened['base_url']}/chat/completions", json=HELLO)).status_code == 200
        await eventually(is_counted, "three calls to be seen")
        shown = await seen()
        assert (shown["error"], shown["missing"]) == (None, [])
        assert 0 < shown["p50"] <= shown["p95"] < 60
        (used,) = shown["engines"]
        assert (used["address"], used["state"], used["gateway"]) == (engine.url, "healthy", gateway)
        latency = (await get(client, "series", seconds=900))["gateways"][gateway]
        assert sum(latency["calls"]) == 3
        assert len(latency["ends"]) == len(latency["p50"]) == len(latency["p95"])


async def test_a_fresh_status_has_what_happened_a_moment_ago() -> None:
    async with (
        FakeEngine() as engine,
        serve_gateway(LocalPool(), [engine.url]) as gateway,
        serve_dashboard(MadeUpPool(8), gateways=[gateway], gateway_interval=3600.0) as url,
        httpx.AsyncClient(base_url=url) as client,
        httpx.AsyncClient(base_url=gateway) as agent,
    ):
        opened = (await agent.post("/init_trajectory", json={})).json()
        for calls in (1, 2):
            assert (await agent.post(f"{opened['base_url']}/chat/completions", json=HELLO)).status_code == 200
            assert (await get(client, "status", fresh=True))["gateways"][0]["calls"] == calls


async def test_a_gateway_that_is_down_or_refuses_the_key_is_told_and_holds_up_nothing() -> None:
    async with (
        FakeEngine() as engine,
        serve_gateway(LocalPool(), [engine.url], control_keys=["another-key-of-tests"]) as refusing,
        serve_dashboard(MadeUpPool(8), gateways=[f"http://127.0.0.1:{free_port()}", refusing]) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):

        async def are_told() -> bool:
            down, locked = (await get(client, "status"))["gateways"]
            return "cannot be reached" in down["error"] and "does not accept" in locked["error"]

        await eventually(are_told, "what is wrong to be told")
        status = await get(client, "status")
        assert [gateway["ready"] for gateway in status["gateways"]] == [False, False]
        assert status["engines"] == []
        assert status["pool_error"] is None
