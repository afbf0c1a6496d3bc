"""T2: an engine whose weights were never synced got calls, and its steps the pool's newest version."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rig.calls import call, get, post
from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import agent_of
from rig.waiting import until
from stepwell.common.tokenizers import load_tokenizer
from stepwell.steps.step import Exactness, VersionSpan

CHAT = "/v1/chat/completions"
GENERATE = {"prompt_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool()


async def engines_of(gateway: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await get(f"{gateway}/engines")).json()["engines"]
    return listed


async def until_state(gateway: str, *states: str) -> None:
    async with asyncio.timeout(30):
        while [engine["state"] for engine in await engines_of(gateway)] != list(states):
            await asyncio.sleep(0.02)


async def test_an_engine_without_a_version_gets_no_calls_once_the_pool_has_one(
    engine: FakeEngine, pool: LocalPool
) -> None:
    await pool.set_policy_version(7)
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await until_state(gateway, "unsynced")
        asked = asyncio.create_task(agent.ask())
        generated = asyncio.create_task(post(f"{gateway}/generate", GENERATE))
        checks = engine.asked["/weight_info"] + 3
        await until(lambda: engine.asked["/weight_info"] >= checks, "three more checks")
        assert (engine.asked[CHAT], asked.done(), generated.done()) == (0, False, False)
        (shown,) = await engines_of(gateway)
        assert shown["why"] == ("its weights are 'default', and the pool's version is 7: it waits for a weight sync")
        assert (await get(f"{gateway}/v1/models")).status == 200, "no weights are needed to name the model"
        engine.weight_version = "6"
        await asked
        assert (await generated).json()["policy_version"] == 6
        await agent.complete()
    (step,) = pool.taken()
    assert (step.policy_version, step.version_spans) == (6, (VersionSpan(6, 0, len(step.response_ids)),))


async def test_before_the_first_version_an_engine_serves_the_weights_that_it_was_started_with(
    engine: FakeEngine, pool: LocalPool
) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        await agent.complete()
        await pool.set_policy_version(1, check=False)
        await until_state(gateway, "unsynced")
    (step,) = pool.taken()
    assert (step.policy_version, step.version_spans) == (0, ())


async def test_an_engine_that_lost_its_weights_gets_no_calls_and_the_other_all(pool: LocalPool) -> None:
    async with FakeEngine() as restarted, FakeEngine() as synced:
        restarted.weight_version = synced.weight_version = "3"
        await pool.set_policy_version(3)
        async with serve_gateway(pool, [restarted.url, synced.url]) as gateway, agent_of(gateway) as agent:
            await until_state(gateway, "healthy", "healthy")
            restarted.weight_version = "default"
            await until_state(gateway, "unsynced", "healthy")
            for _ in range(4):
                await agent.ask()
            assert (restarted.asked[CHAT], synced.asked[CHAT]) == (0, 4)
            await agent.complete()
    assert {step.policy_version for step in pool.taken()} == {3}


async def test_an_engine_in_the_middle_of_a_change_gets_no_calls_even_at_version_0(
    engine: FakeEngine, pool: LocalPool
) -> None:
    engine.weight_version = "changing from default"
    async with serve_gateway(pool, [engine.url]) as gateway:
        await until_state(gateway, "unsynced")
        engine.weight_version = "1"
        await until_state(gateway, "healthy")


async def test_an_answer_from_before_a_change_has_the_version_of_before(engine: FakeEngine, pool: LocalPool) -> None:
    engine.weight_version = "3"
    await pool.set_policy_version(3)
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await until_state(gateway, "healthy")
        engine.faults = Faults(version_change_at_token=20, new_version="changing from 3", times=1)
        await agent.ask()
        await agent.complete()
    (step,) = pool.taken()
    assert step.version_spans == (VersionSpan(3, 0, len(step.response_ids)),)


async def test_an_answer_of_weights_that_nobody_knows_is_not_trained(engine: FakeEngine, pool: LocalPool) -> None:
    engine.weight_version = "3"
    await pool.set_policy_version(3)
    async with serve_gateway(pool, [engine.url]) as gateway, agent_of(gateway) as agent:
        await until_state(gateway, "healthy")
        engine.faults = Faults(version_change_at_token=20, new_version="changing", times=1)
        await agent.ask()
        await agent.complete()
    (step,) = await pool.quarantined()
    assert step.quarantine is not None
    assert step.quarantine.startswith("version_unknown: ")


async def test_a_vllm_that_hides_its_version_is_named_with_what_to_do(engine: FakeEngine, pool: LocalPool) -> None:
    engine.weight_version = None  # type: ignore[assignment]
    await pool.set_policy_version(1)
    async with serve_gateway(pool, [engine.url]) as gateway:
        await until_state(gateway, "unsynced")
        (shown,) = await engines_of(gateway)
    assert shown["why"].endswith("start vLLM with VLLM_SERVER_DEV_MODE=1")


async def test_the_steps_of_a_plain_server_say_that_their_version_is_unknown(pool: LocalPool, tiny_model: Path) -> None:
    await pool.set_policy_version(2)
    async with (
        FakeEngine(plain=True) as plain,
        serve_gateway(pool, [plain.url], load_tokenizer=lambda _: load_tokenizer(str(tiny_model))) as gateway,
        agent_of(gateway) as agent,
    ):
        async with asyncio.timeout(30):
            while (await get(f"{gateway}/ready")).status != 200:
                await asyncio.sleep(0.02)
        await agent.ask()
        await agent.complete()
    (step,) = pool.taken()
    assert (step.exactness, step.extras["version"]) == (Exactness.RETOKENIZED, "unknown")


async def test_gateways_share_their_engines(pool: LocalPool) -> None:
    async with FakeEngine() as first, FakeEngine() as second:
        async with serve_gateway(pool, [first.url]) as one, serve_gateway(pool, [first.url]) as other:
            assert (await post(f"{one}/engines", {"address": f"{second.url}/"})).status == 200
            await until_state(other, "healthy", "healthy")
            assert set(await pool.engines()) == {first.url, second.url}, "in the order of arrival: one may publish late"
            assert (await call("DELETE", f"{other}/engines?address={first.url}")).status == 200
            await until_state(one, "healthy")
            assert await pool.engines() == (second.url,)
        async with serve_gateway(pool, [first.url]) as later:
            await until_state(later, "healthy", "healthy")
            assert set(await pool.engines()) == {second.url, first.url}


async def test_a_pool_that_lost_its_list_gets_it_again(engine: FakeEngine, pool: LocalPool) -> None:
    async with serve_gateway(pool, [engine.url]) as gateway:
        await until_state(gateway, "healthy")
        fresh, lost = LocalPool(), pool.transport.services[pool.plan.name]
        pool.transport.services = fresh.transport.services
        await lost.set_policy_version(1)  # ends the call that waits there, as the end of its process would
        async with asyncio.timeout(30):
            while await fresh.engines() != (engine.url,):
                await asyncio.sleep(0.02)
        await until_state(gateway, "healthy")
