"""How the gateway treats agents, engines and the pool when they repeat themselves, leave, wait, come and go."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from rig.chatml import render_chat
from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import free_port, serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, Agent, Heard, agent_of
from rig.vocabulary import END_OF_TURN, encode
from rig.waiting import until
from stepwell.gateway.app import GatewayLimits
from stepwell.steps.step import Exactness

CHAT = "/v1/chat/completions"
FOR_EVER = 3600.0
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        yield agent


# --- an answer that takes its time


@pytest.fixture
async def impatient(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    """An agent whose gateway keeps a stream alive after 0.2 s of silence."""
    limits = GatewayLimits(keep_alive_seconds=0.2)
    async with serve_gateway(pool, [engine.url], limits=limits) as url, agent_of(url) as agent:
        yield agent


@pytest.mark.parametrize(
    ("faults", "data_before"),
    [
        (Faults(delay_s=FOR_EVER), 0),
        (Faults(silent_s=FOR_EVER), 1),
        (Faults(silent_s=FOR_EVER, silent_at_token=3), 4),
    ],
)
async def test_while_an_engine_is_silent_the_stream_is_kept_alive_by_comments(
    impatient: Agent, pool: LocalPool, engine: FakeEngine, faults: Faults, data_before: int
) -> None:
    engine.faults = faults
    engine.replies.extend([Reply("well"), Reply("well")])
    async with asyncio.timeout(30), impatient.http.post(impatient.chat, json={**HELLO, "stream": True}) as answer:
        text = ""
        while text.count("data: ") < data_before or not text.endswith(2 * ": keep-alive\n\n"):
            text += (await answer.content.readany()).decode()
            assert not answer.content.at_eof(), text
        assert text.count("data: ") == data_before
        engine.speaks.set()
        events = (await answer.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert await impatient.ask(stream=True) == Heard("well", "stop")
    await impatient.complete()
    assert len(pool.taken()) == 2


async def test_an_error_after_comments_is_an_event_that_the_sdk_raises(impatient: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(delay_s=0.5, error_status=400)
    with pytest.raises(openai.APIError, match="told to fail"):
        await impatient.ask(stream=True)


async def test_an_unstreamed_answer_is_given_no_comments(impatient: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(delay_s=0.5)
    assert (await impatient.say())[1].startswith("{")


# --- limits


@streamed_or_not
async def test_a_context_that_is_too_long_is_openais_error_and_the_trajectory_says_why_it_ended(
    pool: LocalPool, stream: bool
) -> None:
    async with (
        FakeEngine(max_model_len=60) as engine,
        serve_gateway(pool, [engine.url]) as url,
        agent_of(url, metadata={"task": 7}) as agent,
    ):
        await agent.ask(stream=stream)
        with pytest.raises(openai.BadRequestError) as refused:
            await agent.ask(stream=stream, messages=[{"role": "user", "content": "x" * 60}])
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert "maximum context length is 60 tokens" in refused.value.message
        await agent.complete(reward=0.5)
    (step,) = pool.taken()
    assert step.metadata == {"task": 7, "ended_by": "context_length_exceeded"}
    assert step.reward == 0.5


async def test_beyond_the_most_calls_in_flight_an_agent_is_told_to_come_back(
    pool: LocalPool, engine: FakeEngine
) -> None:
    limits = GatewayLimits(max_in_flight=2)
    async with serve_gateway(pool, [engine.url], limits=limits) as url, agent_of(url) as agent:
        engine.faults = Faults(delay_s=FOR_EVER)  # a pause would be seen, and the calls held at the gateway
        running = [asyncio.create_task(agent.ask()) for _ in range(2)]
        await until(lambda: engine.in_flight == 2 or any(call.done() for call in running), "both calls to arrive")
        assert not any(call.done() for call in running), running
        with pytest.raises(openai.RateLimitError, match="2 calls are in flight") as refused:
            await agent.ask()
        assert (refused.value.code, refused.value.response.headers["Retry-After"]) == ("overloaded", "1")
        engine.speaks.set()
        await asyncio.gather(*running)
        assert (await agent.ask()).text


# --- the pool


@streamed_or_not
async def test_with_durability_sync_an_answer_ends_once_the_pool_has_its_step(
    pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    async with serve_gateway(pool, [engine.url], is_durable=True) as url, agent_of(url) as agent:
        pool.away = True
        asking = asyncio.create_task(agent.ask(stream=stream))
        await until(lambda: engine.asked[CHAT] == 1 and engine.in_flight == 0, "the engine to have answered")
        await asyncio.wait([asking], timeout=0.3)
        assert not asking.done()
        pool.away = False
        assert (await asking).text
        assert pool.rules.stats().channels["train"].accepted.steps == 1


async def test_with_durability_sync_a_rollout_may_end_at_another_gateway(pool: LocalPool, engine: FakeEngine) -> None:
    one, other = (serve_gateway(pool, [engine.url], is_durable=True) for _ in range(2))
    async with one as url, other as elsewhere, agent_of(url) as agent, aiohttp.ClientSession(elsewhere) as http:
        await agent.ask()
        async with http.post(f"{agent.path}/v1/complete_trajectory", json={"reward": 1.0}) as ended:
            assert await ended.json() == {"status": "completed"}
    assert [step.reward for step in pool.taken()] == [1.0]


@streamed_or_not
async def test_with_durability_sync_an_answer_that_the_pool_does_not_confirm_is_an_error_and_is_kept(
    pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    limits = GatewayLimits(confirm_timeout=0.2)
    async with serve_gateway(pool, [engine.url], is_durable=True, limits=limits) as url, agent_of(url) as agent:
        pool.away = True
        with pytest.raises(openai.APIError, match="has not confirmed this call within 0.2 s; it is kept") as failed:
            await agent.ask(stream=stream)
        assert failed.value.code == "pool_unavailable"
        if isinstance(failed.value, openai.APIStatusError):
            assert failed.value.status_code == 503
        pool.away = False
        await agent.complete()
    assert pool.rules.stats().channels["train"].accepted.steps == 1
    assert pool.rules.stats().marked == {"unseen": 1}, "its agent got an error"


# --- engines


class Letters:
    """A tokenizer for a server that gives text only: that of the fake engine's own words."""

    eos_token_id = END_OF_TURN

    def encode(self, text: str, **_: object) -> list[int]:
        return encode(text)

    def apply_chat_template(self, messages: Any, tools: Any, **_: object) -> str:
        return render_chat(messages, tools or ())


@streamed_or_not
async def test_the_answer_of_a_plain_openai_server_is_graded_retokenized_and_left_out_by_default(
    pool: LocalPool, stream: bool
) -> None:
    async with (
        FakeEngine(plain=True, replies=["left out", "taken"]) as engine,
        serve_gateway(pool, [engine.url], load_tokenizer=lambda _: Letters()) as url,
        agent_of(url) as one,
        agent_of(url) as other,
    ):
        assert await one.ask(stream=stream) == Heard("left out", "stop")
        await one.complete(reward=1.0)
        assert pool.rules.take(1) is None
        assert pool.rules.stats().channels["train"].left_out["exactness"].steps == 1
        await other.ask(stream=stream)
        await other.complete(reward=1.0)
    (step,) = pool.taken()
    assert step.exactness is Exactness.RETOKENIZED
    assert step.prompt_ids.tolist() == encode(render_chat(HELLO["messages"]))
    assert step.response_ids.tolist() == [*encode("taken"), END_OF_TURN]


@streamed_or_not
async def test_a_call_marked_as_a_side_call_is_kept_and_not_trained(
    agent: Agent, pool: LocalPool, stream: bool
) -> None:
    await agent.ask(stream=stream, extra_headers={"x-stepwell-call": "side"})
    await agent.ask(stream=stream, extra_headers={"x-stepwell-call": "task"})
    assert await agent.metric('stepwell_untrainable_total{reason="side_call"}') == 1
    with pytest.raises(openai.BadRequestError, match='x-stepwell-call is "task" or "side"'):
        await agent.ask(stream=stream, extra_headers={"x-stepwell-call": "other"})
    await agent.complete()
    assert [step.untrainable for step in pool.taken()] == ["side_call: marked", None]


async def states(agent: Agent) -> list[str]:
    async with agent.http.get("/engines") as listed:
        return [engine["state"] for engine in (await listed.json())["engines"]]


async def until_states(agent: Agent, *wanted: str) -> None:
    async with asyncio.timeout(60):
        while await states(agent) != list(wanted):
            await asyncio.sleep(0.01)


@streamed_or_not
async def test_calls_are_held_while_all_engines_pause_and_go_elsewhere_while_one_does(
    pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    async with (
        FakeEngine() as other,
        serve_gateway(pool, [engine.url, other.url]) as url,
        agent_of(url) as agent,
    ):
        engine.pause()
        await until_states(agent, "paused", "healthy")
        for _ in range(4):
            await agent.ask(stream=stream)
        assert (engine.asked[CHAT], other.asked[CHAT]) == (0, 4)
        other.pause()
        await until_states(agent, "paused", "paused")
        held = [asyncio.create_task(agent.ask(stream=stream)) for _ in range(4)]
        await agent.until_metric("stepwell_in_flight", 4)
        assert (engine.asked[CHAT], other.asked[CHAT]) == (0, 4)
        for paused in (engine, other):
            paused.resume()
        assert all(heard.text for heard in await asyncio.gather(*held))
        await agent.complete()
        assert len(pool.taken()) == 8


async def test_engines_come_and_go_under_load_without_an_agent_noticing(pool: LocalPool, engine: FakeEngine) -> None:
    async with (
        FakeEngine() as other,
        serve_gateway(pool, [engine.url]) as url,
        agent_of(url) as agent,
    ):
        engine.faults = other.faults = Faults(token_delay_s=0.002)
        talking = asyncio.create_task(talk(agent, until_asked=other, count=12))
        for _ in range(3):
            async with agent.http.post("/engines", json={"address": other.url}) as added:
                assert [found["state"] for found in (await added.json())["engines"]] == ["healthy", "healthy"]
            asked = other.asked[CHAT]
            await until(lambda asked=asked: other.asked[CHAT] > asked + 3, "calls to come")  # type: ignore[misc]
            async with agent.http.delete("/engines", params={"address": other.url}) as removed:
                assert [found["address"] for found in (await removed.json())["engines"]] == [engine.url]
        said = await talking
        await agent.complete()
        assert len(pool.taken()) == said


async def talk(agent: Agent, *, until_asked: FakeEngine, count: int) -> int:
    """Eight calls at a time, until that engine has had so many; gives how many were made."""
    said = 0
    while until_asked.asked[CHAT] < count:
        heard = await asyncio.gather(*(agent.ask(stream=bool(i % 2)) for i in range(8)))
        said += sum(bool(each.text) for each in heard)
    return said


@pytest.mark.parametrize("address", ["http://127.0.0.1:{free}", f"http://{'a' * 70}", "http://h:99999"])
async def test_an_engine_that_cannot_be_reached_is_added_as_down_and_harms_no_call(agent: Agent, address: str) -> None:
    address = address.format(free=free_port())
    async with agent.http.post("/engines", json={"address": address}) as added:
        _, unreachable = (await added.json())["engines"]
    assert unreachable["state"] == "down"
    assert unreachable["why"] not in ("", "not probed yet")
    for _ in range(3):
        assert (await agent.ask()).text


@pytest.mark.parametrize("address", ["ftp://h", "h:80", "http://", "http://h/?x", "http://a b", "", 7])
async def test_what_is_no_address_is_refused(agent: Agent, address: object) -> None:
    async with agent.http.post("/engines", json={"address": address}) as added:
        assert added.status == 400
    assert await states(agent) == ["healthy"]


async def test_an_engine_that_is_not_there_cannot_be_removed(agent: Agent) -> None:
    async with agent.http.delete("/engines", params={"address": "http://nowhere:1"}) as removed:
        assert removed.status == 400
        assert "there is no engine http://nowhere:1" in await removed.text()


async def test_an_engine_stays_if_the_pool_cannot_be_told_that_it_leaves(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    pool.away = True
    async with agent.http.delete("/engines", params={"address": engine.url}) as removed:
        assert removed.status == 503
    assert await states(agent) == ["healthy"]


# --- sight


async def test_metrics_show_calls_tokens_engines_quarantine_and_what_waits_for_the_pool(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    for stream in (False, True):
        await agent.ask(stream=stream)
    engine.faults = Faults(wrong_usage=True, times=1)
    await agent.ask()
    with pytest.raises(openai.NotFoundError):
        await agent.ask(model="nope")
    await agent.until_metric('stepwell_delivered_steps_total{verdict="accepted"}', 2)
    await agent.until_metric('stepwell_delivered_steps_total{verdict="quarantined"}', 1)
    pool.away = True
    engine.faults = Faults()
    await agent.ask()
    expected = {
        'stepwell_calls_total{kind="chat",status="200"}': 4,
        'stepwell_calls_total{kind="chat",status="404"}': 1,
        'stepwell_steps_total{exactness="engine"}': 4,
        'stepwell_quarantined_total{reason="response_count"}': 1,
        'stepwell_call_seconds_count{kind="chat"}': 5,
        f'stepwell_engine_state{{engine="{engine.url}",state="healthy"}}': 1,
        f'stepwell_engine_state{{engine="{engine.url}",state="down"}}': 0,
        "stepwell_waiting_steps": 1,
        "stepwell_in_flight": 0,
    }
    assert {line: await agent.metric(line) for line in expected} == expected
    prompt = len(encode(render_chat(HELLO["messages"])))
    assert await agent.metric('stepwell_tokens_total{direction="prompt"}') == 4 * prompt
    for line in ('stepwell_tokens_total{direction="response"}', "stepwell_waiting_bytes"):
        assert (await agent.metric(line) or 0) > 0
    pool.away = False


async def test_metrics_show_how_late_the_event_loop_wakes(agent: Agent) -> None:
    await agent.until_metric('stepwell_loop_lag_seconds_bucket{le="+Inf"}', 3)
