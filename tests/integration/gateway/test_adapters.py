"""Two channels on one engine, each with an adapter of its own."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO
from rig.waiting import until
from stepwell.pool.api.producing import Registration
from stepwell.steps.step import VersionSpan


@pytest.fixture
async def url(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[str]:
    for channel in ("east", "west", "plain"):
        await pool.register_trajectory(Registration(f"t-{channel}", f"p-{channel}", channel))
    async with serve_gateway(pool, [engine.url]) as url:
        yield url


async def ask(url: str, channel: str, **wanted: Any) -> tuple[int, dict[str, Any]]:
    path = f"{url}/t-{channel}/p-{channel}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(path, json={**HELLO, **wanted}) as reply:
        return reply.status, await reply.json()


def models_asked(engine: FakeEngine) -> list[str]:
    return [asked.body["model"] for asked in engine.requests if asked.path == "/v1/chat/completions"]


async def serve(pool: LocalPool, engine: FakeEngine, *adapters: tuple[str, int]) -> None:
    """Returns when the gateway knows them."""
    for channel, version in adapters:
        engine.adapters.add(f"{channel}-v{version}")
        await pool.set_adapter(channel, f"{channel}-v{version}", version)
    channels = (await pool.newest_serving()).channels
    await until(
        lambda: pool.serving is not None and pool.serving.channels == channels, "the gateway to hear of the adapters"
    )


async def test_each_channel_gets_its_own_adapter_under_its_own_version(
    url: str, pool: LocalPool, engine: FakeEngine
) -> None:
    await serve(pool, engine, ("east", 7), ("west", 2))
    for channel in ("east", "west", "plain"):
        status, answer = await ask(url, channel)
        assert status == 200, answer
    assert models_asked(engine) == ["east-v7", "west-v2", engine.model]
    await until(lambda: pool.rules.stats().submitted == 3, "the steps to arrive")
    for channel, version in (("east", 7), ("west", 2)):
        await pool.complete_trajectory(f"t-{channel}", f"p-{channel}", 1.0)
        (step,) = pool.taken(channel)
        assert (step.policy_version, step.model, step.untrainable) == (version, f"{channel}-v{version}", None)
        assert step.version_spans == (VersionSpan(version, 0, len(step.response_ids)),)


async def test_an_agent_cannot_name_the_adapter_of_another_channel(
    url: str, pool: LocalPool, engine: FakeEngine
) -> None:
    await serve(pool, engine, ("east", 7), ("west", 2))
    status, answer = await ask(url, "west", model="east-v7")
    assert (status, "east-v7" in answer["error"]["message"]) == (404, True), answer


async def test_a_paused_channel_waits_and_the_other_does_not(url: str, pool: LocalPool, engine: FakeEngine) -> None:
    await serve(pool, engine, ("east", 1), ("west", 1))
    await pool.pause_channel("east", paused=True)
    await serve(pool, engine)
    held = asyncio.create_task(ask(url, "east"))
    assert (await ask(url, "west"))[0] == 200
    assert not held.done()
    await serve(pool, engine, ("east", 2))
    assert not held.done(), "a new adapter does not end a pause"
    await pool.pause_channel("east", paused=False)
    assert (await held)[0] == 200
    assert models_asked(engine)[-1] == "east-v2", "a held call gets the newest adapter"


async def test_an_engine_that_lacks_the_adapter_is_a_reason_to_ask_again(
    url: str, pool: LocalPool, engine: FakeEngine
) -> None:
    await serve(pool, engine, ("east", 1))
    engine.adapters.clear()
    status, answer = await ask(url, "east")
    assert (status, "does not have the adapter east-v1" in answer["error"]["message"]) == (502, True), answer
