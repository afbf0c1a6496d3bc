"""A call that is made twice and meant once: one call to the engine, one step, the answer to all who wait for it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, Agent, Heard, agent_of
from rig.waiting import until

CHAT = "/v1/chat/completions"
SAME_KEY: dict[str, Any] = {"extra_headers": {"Idempotency-Key": "once"}}
SLOWLY = Faults(token_delay_s=0.01)
FOR_EVER = Faults(delay_s=60.0)
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        yield agent


@streamed_or_not
async def test_calls_with_one_idempotency_key_are_one_call_and_one_step(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = SLOWLY
    first, second = await asyncio.gather(*(agent.ask(stream=stream, **SAME_KEY) for _ in range(2)))
    later = await agent.ask(stream=stream, **SAME_KEY)
    assert first == second == later
    assert first.text
    assert engine.asked[CHAT] == 1
    assert await agent.metric('stepwell_calls_joined_total{kind="chat"}') == 2
    await agent.complete()
    assert len(pool.taken()) == 1


async def test_the_same_key_in_another_trajectory_is_another_call(agent: Agent, engine: FakeEngine) -> None:
    async with agent_of(str(agent.client.base_url.copy_with(path=""))) as other:
        for each in (agent, other):
            await each.ask(**SAME_KEY)
    assert engine.asked[CHAT] == 2


@streamed_or_not
async def test_the_same_body_joins_while_it_is_in_flight_and_not_afterwards(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = SLOWLY
    (status, first), (_, second) = await asyncio.gather(agent.say(stream=stream), agent.say(stream=stream))
    assert (status, engine.asked[CHAT]) == (200, 1)
    assert first == second
    await agent.say(stream=stream)
    assert engine.asked[CHAT] == 2
    await agent.complete()
    assert len(pool.taken()) == 2


@pytest.mark.parametrize(
    ("first", "second", "asked"),
    [("0", "0", 2), ("0", "1", 1), ("1", "0", 2), ("1", "1", 1), ("", "1", 1), ("1", "", 1)],
)
async def test_a_client_that_counts_its_tries_is_believed(
    agent: Agent, engine: FakeEngine, first: str, second: str, asked: int
) -> None:
    """Its first try is a call of its own; a later one joins what is in flight."""
    engine.pause()
    calls = []
    for count in (first, second):
        headers = {"x-stainless-retry-count": count} if count else None
        calls.append(asyncio.create_task(agent.say(headers=headers)))
        await agent.until_metric("stepwell_in_flight", len(calls))
    engine.resume()
    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
    assert engine.asked[CHAT] == asked


@streamed_or_not
async def test_when_the_first_client_leaves_the_one_that_joined_gets_all_of_the_answer(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = Faults(token_delay_s=0.02)
    engine.replies.append(Reply("two and twenty letters"))
    first = asyncio.create_task(agent.ask(stream=stream, **SAME_KEY))
    await until(lambda: engine.in_flight == 1, "the call to arrive")
    second = asyncio.create_task(agent.ask(stream=stream, **SAME_KEY))
    await agent.until_metric('stepwell_calls_joined_total{kind="chat"}', 1)
    first.cancel()
    assert await second == Heard("two and twenty letters", "stop")
    assert (engine.asked[CHAT], engine.disconnects) == (1, 0)
    await agent.complete()
    assert len(pool.taken()) == 1


@streamed_or_not
async def test_when_all_who_wait_for_an_answer_have_left_the_engine_is_freed_within_a_second(
    agent: Agent, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = FOR_EVER
    waiting = [asyncio.create_task(agent.ask(stream=stream, **SAME_KEY)) for _ in range(3)]
    await agent.until_metric('stepwell_calls_joined_total{kind="chat"}', 2)
    for left in waiting[:2]:
        left.cancel()
    await agent.until_metric('stepwell_clients_gone_total{kind="chat"}', 1)
    assert engine.in_flight == 1
    waiting[2].cancel()
    await until(lambda: engine.in_flight == 0, "the engine to be free", timeout=1.0)


@pytest.mark.parametrize(
    ("faults", "stream"),
    [
        (Faults(error_status=500, times=1), False),
        (Faults(error_status=500, times=1), True),
        (Faults(disconnect_at_token=3, times=1), False),
        (Faults(disconnect_at_token=3, times=1), True),
        (Faults(error_at_token=3, times=1), True),
    ],
)
async def test_a_failed_answer_is_not_given_again(
    agent: Agent, pool: LocalPool, engine: FakeEngine, faults: Faults, stream: bool
) -> None:
    engine.faults = faults
    engine.replies.extend([Reply("broken"), Reply("whole")])
    with pytest.raises(openai.APIError):
        await agent.ask(stream=stream, **SAME_KEY)
    engine.replies = type(engine.replies)([Reply("whole")])
    assert await agent.ask(stream=stream, **SAME_KEY) == Heard("whole", "stop")
    assert engine.asked[CHAT] == 2
    await agent.complete()
    assert len(pool.taken()) == 1


async def test_a_stream_that_its_client_left_is_not_given_to_its_retry(agent: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(token_delay_s=0.05, times=1)
    left = await agent.client.chat.completions.create(**HELLO, **SAME_KEY, stream=True)
    await anext(aiter(left))
    await left.close()
    await until(lambda: engine.in_flight == 0, "the engine to be free")
    engine.replies.append(Reply("whole"))
    assert await agent.ask(stream=True, **SAME_KEY) == Heard("whole", "stop")
