"""U1: a version that was set by hand, and that no engine reports, stopped all calls without a word."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

import stepwell
from rig.asked import called
from rig.calls import get
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import agent_of
from rig.waiting import until
from stepwell.commands.policy import set_version
from stepwell.engines.engine import EngineTimeouts
from stepwell.errors import Conflict, NotReady, PoolUnavailable
from tests.integration.truth.test_engines_without_known_weights_get_no_calls import engines_of, until_state

CHAT = "/v1/chat/completions"
MENDED_BY = "Start the trainer; or, to go on with the weights that the engine has, run: stepwell policy set 0"
SOON = EngineTimeouts(unsynced=0.2)
TOLD_WITHIN = 10.0
"""Seconds."""


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool(clock=time.monotonic)


def readme_agent(gateway: str) -> None:
    """The README's agent, with the SDK's own retries."""
    run = stepwell.connect(gateway)
    for _ in range(2):
        with run.trajectory(prompt_uid="greeting", group_size=2) as t:
            agent = OpenAI(base_url=t.base_url, api_key=t.api_key)
            model = agent.models.list().data[0].id
            reply = agent.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
            )
            t.reward = 1.0 if "hello" in str(reply.choices[0].message.content).lower() else 0.0


async def ready(gateway: str) -> dict[str, str]:
    missing: dict[str, str] = (await get(f"{gateway}/ready")).json()["missing"]
    return missing


async def until_missing(gateway: str, *parts: str) -> dict[str, str]:
    async with asyncio.timeout(TOLD_WITHIN):
        while (missing := await ready(gateway)).keys() != set(parts):
            await asyncio.sleep(0.02)
    return missing


@pytest.mark.parametrize("told", ["default", None], ids=["as vLLM starts", "vLLM without its development mode"])
async def test_the_agent_runs_again_after_a_version_that_no_engine_has_was_set(
    engine: FakeEngine, pool: LocalPool, told: str | None
) -> None:
    engine.weight_version = told  # type: ignore[assignment]
    async with serve_gateway(pool, [engine.url]) as gateway:
        await asyncio.to_thread(readme_agent, gateway)
        with pytest.raises(Conflict) as refused:
            await pool.set_policy_version(1)
        assert str(refused.value).startswith(
            f"no engine reports version 1: {engine.url} has the weights that it was started with. "
        )
        assert "WeightSync" in str(refused.value)
        assert (await pool.newest_serving()).policy_version == 0
        await asyncio.to_thread(readme_agent, gateway)
        assert engine.asked[CHAT] >= 4


async def test_an_answer_of_the_pool_that_comes_too_late_is_no_leave(engine: FakeEngine, pool: LocalPool) -> None:
    asked, call = [], pool.transport.call

    async def late_at_first(shard: str, method: str, args: Any, kwargs: Any) -> Any:
        if called(method, args) == "WhyUnreported":
            asked.append(method)
            if len(asked) <= 2:
                raise PoolUnavailable("no answer in time")
        return await call(shard, method, args, kwargs)

    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        pool.transport.call = late_at_first
        with pytest.raises(Conflict, match="no engine reports version 1"):
            await pool.set_policy_version(1)
    assert len(asked) > 2


async def test_a_version_is_taken_as_soon_as_an_engine_has_it(engine: FakeEngine, pool: LocalPool) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        engine.weight_version = "3"
        await pool.set_policy_version(3)
        with pytest.raises(Conflict, match=f"no engine reports version 5: {engine.url} has version 3"):
            await pool.set_policy_version(5)
        await agent.ask()
        await agent.complete()
    assert pool.taken()[-1].policy_version == 3


async def test_a_version_can_be_set_all_the_same(engine: FakeEngine, pool: LocalPool) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway:
        await until_state(gateway, "healthy")
        await pool.set_policy_version(1, check=False)
        await until_state(gateway, "unsynced")


async def test_engines_that_never_report_a_version_and_a_pool_without_gateways_take_any(pool: LocalPool) -> None:
    async with FakeEngine() as engine, serve_gateway(pool, [engine.url]) as gateway:
        await until_state(gateway, "healthy")
    await pool.set_policy_version(1)
    async with FakeEngine(plain=True) as plain, serve_gateway(pool, [plain.url]) as gateway:
        async with asyncio.timeout(TOLD_WITHIN):
            while not any(engine["state"] == "healthy" for engine in await engines_of(gateway)):
                await asyncio.sleep(0.02)
        await pool.set_policy_version(2)
    assert (await pool.newest_serving()).policy_version == 2


async def test_a_version_of_an_old_journal_is_told_at_once_and_the_command_mends_it(
    engine: FakeEngine, pool: LocalPool
) -> None:
    await pool.set_policy_version(7)  # nobody is asked: there is no gateway
    async with serve_gateway(pool, [engine.url]) as gateway:
        began = time.monotonic()
        (why,) = (await until_missing(gateway, "weights")).values()
        expected = f"{engine.url}: its weights are 'default', and the pool's version is 7: it waits for a weight sync. "
        assert why == f"{expected}No trainer is there to sync them. {MENDED_BY}"
        with pytest.raises(NotReady, match="stepwell policy set 0"):
            await asyncio.to_thread(stepwell.connect, gateway)
        assert time.monotonic() - began < TOLD_WITHIN + 5.0
        assert "stepwell policy set 0" not in await set_version(pool, 0)
        await until_missing(gateway)
        await asyncio.to_thread(readme_agent, gateway)


async def test_a_held_call_is_told_within_ten_seconds_with_the_sdks_retries(
    engine: FakeEngine, pool: LocalPool
) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway:
        run = await asyncio.to_thread(stepwell.connect, gateway)
        async with (
            run.trajectory(prompt_uid="p", group_size=1) as t,
            AsyncOpenAI(base_url=t.base_url, api_key=t.api_key, timeout=60) as agent,
        ):
            await pool.set_policy_version(7, check=False)
            await until_state(gateway, "unsynced")
            began = time.monotonic()
            with pytest.raises(APIStatusError, match="stepwell policy set 0"):
                await agent.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
            assert time.monotonic() - began < TOLD_WITHIN
            assert engine.asked[CHAT] == 0


async def test_calls_are_held_while_a_trainer_is_heard(engine: FakeEngine, pool: LocalPool) -> None:
    async with serve_gateway(pool, [engine.url], timeouts=SOON) as gateway, agent_of(gateway) as agent:
        await pool.announce_sync()
        await pool.set_policy_version(1)  # about to be synced
        await until_state(gateway, "unsynced")
        asked = asyncio.create_task(agent.ask())
        checks = engine.asked["/weight_info"] + 15  # at least 1.5 s: several reports
        await until(lambda: engine.asked["/weight_info"] >= checks, "more checks")
        assert not asked.done()
        assert await ready(gateway) == {}
        engine.weight_version = "1"
        await asked
        await agent.complete()
    assert pool.taken()[0].policy_version == 1


async def test_a_restarted_engine_whose_trainer_is_gone_is_told_and_serves_once_it_has_weights(
    engine: FakeEngine, pool: LocalPool
) -> None:
    engine.weight_version = "3"
    await pool.set_policy_version(3)
    async with serve_gateway(pool, [engine.url], timeouts=SOON) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        engine.weight_version = "default"
        await until_missing(gateway, "weights")
        assert [shown["state"] for shown in await engines_of(gateway)] == ["unsynced"]
        engine.weight_version = "3"
        await until_missing(gateway)
        await agent.ask()
        await agent.complete()
