"""Engines that take new weights: calls wait or go elsewhere, and the version is known."""

import asyncio
import time
from contextlib import AsyncExitStack

import orjson
import pytest

from rig.fake_engine import FakeEngine
from rig.waiting import until
from stepwell.engines.engine import EngineTimeouts
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReply, EngineState
from stepwell.errors import EngineUnavailable
from tests.integration.engines.engine_calls import (
    ASKED,
    CHAT,
    LONG_STREAM,
    addresses,
    call,
    generations,
    states,
    watched,
)


async def checks(engine: FakeEngine, count: int) -> None:
    """Returns once the engine was asked that many times more whether it is paused."""
    last = engine.asked["/is_paused"] + count
    await until(lambda: engine.asked["/is_paused"] >= last, f"{count} checks")


async def test_while_one_engine_is_paused_the_other_gets_the_calls(two: tuple[FakeEngine, FakeEngine]) -> None:
    paused, free = two
    async with watched(*two) as engines:
        paused.pause()
        await until(lambda: states(engines) == ["paused", "healthy"], "the pause to show")
        assert await addresses(engines, 4) == [free.url] * 4
        paused.resume()
        await until(lambda: states(engines) == ["healthy", "healthy"], "the pause to end")
        assert set(await addresses(engines, 4)) == {paused.url, free.url}


async def test_while_all_engines_are_paused_calls_wait_and_then_spread(two: tuple[FakeEngine, FakeEngine]) -> None:
    async with watched(*two) as engines:
        for fake in two:
            fake.pause()
        await until(lambda: states(engines) == ["paused", "paused"], "the pauses to show")
        held = [asyncio.create_task(call(engines)) for _ in range(20)]
        await checks(two[0], 3)
        assert not any(task.done() for task in held)
        assert [generations(fake) for fake in two] == [0, 0], "a paused engine got a call"
        for fake in two:
            fake.resume()
        answers = await asyncio.gather(*held)
        assert {status for status, _ in answers} == {200}
        assert [generations(fake) for fake in two] == [10, 10], "all that waited fell on the first to resume"


async def test_a_call_waits_for_its_only_engine(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        engine.pause("abort")
        await until(lambda: states(engines) == ["paused"], "the pause to show")
        held = asyncio.create_task(engines.send(CHAT, ASKED))
        await checks(engine, 3)
        assert (generations(engine), held.done()) == (0, False)
        engine.weight_version = "5"
        engine.resume()
        reply = await held
        assert (reply.status, reply.version_before) == (200, 5)
        await reply.read()


async def test_a_call_in_the_middle_of_a_change_is_not_older_than_the_weights_before_it(engine: FakeEngine) -> None:
    engine.weight_version = "5"
    async with EngineFleet([engine.url]) as engines:
        engine.weight_version = "changing from 5"
        await engines.version_after(engines.replicas[0])  # another call's question sees the change before any check
        reply = await engines.send(CHAT, ASKED)
        assert reply.version_before == 5
        await reply.read()


async def test_an_engine_that_loads_weights_is_deaf_but_not_down(engine: FakeEngine) -> None:
    async with watched(engine, timeouts=EngineTimeouts(question=0.1)) as engines:
        engine.listens.clear()
        await checks(engine, 2)
        assert states(engines) == ["healthy"]
        assert (await call(engines))[0] == 200
        engine.listens.set()
        engine.pause()
        await until(lambda: states(engines) == ["paused"], "the pause to show")
        engine.listens.clear()
        held = asyncio.create_task(call(engines))
        await checks(engine, 3)
        assert states(engines) == ["paused"]
        assert not held.done()
        engine.listens.set()
        engine.resume()
        assert (await held)[0] == 200


async def test_a_wait_for_paused_engines_is_bounded_and_says_for_whom(engine: FakeEngine) -> None:
    engine.pause()
    async with watched(engine, timeouts=EngineTimeouts(hold=0.1)) as engines:
        assert states(engines) == ["paused"]
        with pytest.raises(EngineUnavailable, match=f"waited 0.1 s for a paused engine to resume: {engine.url}"):
            await call(engines)


async def test_the_version_is_told_by_a_question_asked_afterwards(engine: FakeEngine) -> None:
    async with EngineFleet([engine.url]) as engines:
        reply: EngineReply = await engines.send(CHAT, ASKED)
        await reply.read()
        assert (reply.version_before, reply.engine.weight_version) == (None, "default")
        engine.weight_version = "7"
        before = time.monotonic()
        assert await engines.version_after(reply.engine) == 7
        assert reply.engine.version_checked_at >= before
        assert engines.replicas[0].weight_version == "7"


async def test_many_who_ask_for_the_version_share_a_question(engine: FakeEngine) -> None:
    async with EngineFleet([engine.url]) as engines:
        engine.weight_version = "3"
        reply = await engines.send(CHAT, ASKED)
        await reply.read()
        so_far = engine.asked["/weight_info"]
        first = [asyncio.create_task(engines.version_after(reply.engine)) for _ in range(500)]
        await until(lambda: engine.asked["/weight_info"] == so_far + 1, "the first question")
        later = [asyncio.create_task(engines.version_after(reply.engine)) for _ in range(500)]
        assert set(await asyncio.gather(*first, *later)) == {3}
        assert engine.asked["/weight_info"] <= so_far + 3


async def test_a_version_that_cannot_be_told_is_none(engine: FakeEngine) -> None:
    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(FakeEngine())
        async with EngineFleet([mortal.url]) as engines:
            mortal.weight_version = "3"
            reply = await engines.send(CHAT, ASKED)
            await reply.read()
            assert await engines.version_after(reply.engine) == 3
            await stack.aclose()
            assert await engines.version_after(reply.engine) is None


async def test_the_models_are_those_of_an_engine(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        status, body = await engines.models()
    assert (status, orjson.loads(body)["data"][0]["id"]) == (200, "tiny")


async def test_states_show_each_engine(two: tuple[FakeEngine, FakeEngine]) -> None:
    two[1].weight_version = "12"
    async with watched(*two) as engines:
        reply = await engines.send(CHAT, LONG_STREAM)
        first, second = engines.replicas
        assert (first.address, first.state, first.why, first.in_flight) == (two[0].url, EngineState.HEALTHY, "", 1)
        assert (second.weight_version, second.in_flight) == ("12", 0)
        reply.close()
