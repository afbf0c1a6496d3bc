"""OpenAI's Responses with the real openai package, a real gateway and the fake engine; the pool in memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from rig.vocabulary import END_OF_TURN, encode
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Exactness, Step

ADD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD},
    {"type": "custom", "name": "edit", "description": "Edits."},
    {"type": "web_search"},
]
EDIT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "edit", "description": "Edits.", "parameters": EDIT}},
]
REPLIES = (
    Reply("let me see", (ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4})), reasoning="two sums"),
    Reply("", (ToolCall("edit", {"input": 'x = "3"\n'}),)),
    Reply("all done", reasoning="it fits"),
)
RESULTS = {"add": "7", "edit": "edited"}
FOR_EVER = 3600.0


@pytest.fixture
async def url(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[str]:
    async with serve_gateway(pool, [engine.url], response_length=256) as url:
        yield url


@pytest.fixture
async def agent(url: str) -> AsyncIterator[Agent]:
    async with agent_of(url) as agent:
        yield agent


async def respond(agent: Agent, items: list[Any], *, stream: bool, **wanted: Any) -> Any:
    asked = {"model": "tiny", "input": items, "tools": TOOLS, "instructions": "Be brief.", "store": False, **wanted}
    if not stream:
        return await agent.client.responses.create(**asked)
    async with agent.client.responses.stream(**asked) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


async def run_responses(agent: Agent, *, stream: bool) -> list[Any]:
    """A loop of tools, as a program would write it. Returns all items of the last input."""
    items: list[Any] = [{"role": "user", "content": "add them"}]
    while True:
        response = await respond(agent, items, stream=stream)
        items += response.output
        calls = [item for item in response.output if item.type in ("function_call", "custom_tool_call")]
        if not calls:
            return items
        items += [
            {"type": f"{call.type}_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
        ]


async def run_chat(agent: Agent) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "add them"}]
    for _ in REPLIES:
        reply = await agent.client.chat.completions.create(model="tiny", messages=messages, tools=CHAT_TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert call.type == "function"
            result = RESULTS[call.function.name]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def kind_of(item: Any) -> str:
    return str(item.get("type", "message") if isinstance(item, dict) else item.type)


def tokens(steps: list[Step]) -> list[tuple[list[int], list[int]]]:
    return [(step.prompt_ids.tolist(), step.response_ids.tolist()) for step in steps]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tools_is_recorded_with_the_same_tokens_as_by_chat(
    url: str, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.replies.extend(REPLIES * 2)
    async with agent_of(url) as agent:
        items = await run_responses(agent, stream=stream)
        await agent.complete()
        steps = pool.taken()
    assert list(map(kind_of, items)) == [
        *("message", "reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("reasoning", "message"),
    ]
    async with agent_of(url) as agent:
        await run_chat(agent)
        await agent.complete()
    assert tokens(steps) == tokens(pool.taken())
    assert [step.response_ids.tolist() for step in steps] == [reply.ids() for reply in REPLIES]
    assert {(step.exactness, step.quarantine, step.untrainable) for step in steps} == {(Exactness.ENGINE, None, None)}


async def run_by_ids(*agents: Agent, stream: bool) -> None:
    """The same loop, which sends only what is new; the agents, of one trajectory, take turns."""
    response = await respond(agents[0], [{"role": "user", "content": "add them"}], stream=stream, store=True)
    for turn in range(1, len(REPLIES)):
        calls = [item for item in response.output if "call" in item.type]
        items = [
            {"type": f"{call.type}_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
        ]
        wanted = {"previous_response_id": response.id, "store": True}
        response = await respond(agents[turn % len(agents)], items, stream=stream, **wanted)
        assert (response.previous_response_id, response.store) == (wanted["previous_response_id"], True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_that_is_continued_by_ids_is_the_one_that_was_stored(
    url: str, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    """Another gateway takes turns with the first one, whose step may still be on its way to the pool."""
    engine.replies.extend(REPLIES * 2)
    opened, other = {"trajectory_uid": "t", "prompt_uid": "p"}, PoolClient(pool.plan.name, transport=pool.transport)
    async with (
        serve_gateway(other, [engine.url], response_length=256) as other_url,
        agent_of(url, **opened) as agent,
        agent_of(other_url, **opened) as other_agent,
    ):
        await run_by_ids(agent, other_agent, stream=stream)
        await agent.complete()
        steps = pool.taken()
    async with agent_of(url) as agent:
        await run_chat(agent)
        await agent.complete()
    assert tokens(steps) == tokens(pool.taken())


async def test_only_what_this_trajectory_stored_can_be_continued(url: str, pool: LocalPool, engine: FakeEngine) -> None:
    engine.replies.extend([Reply("one"), Reply("two")])
    async with agent_of(url) as agent, agent_of(url) as other:
        unstored = await agent.client.responses.create(model="tiny", input="how?", store=False)
        foreign = await other.client.responses.create(model="tiny", input="how?")
        for previous in (unstored, foreign):
            with pytest.raises(openai.BadRequestError, match="no stored response with this id") as refused:
                await agent.client.responses.create(model="tiny", input="and?", previous_response_id=previous.id)
            assert refused.value.code == "previous_response_not_found"
        assert (unstored.store, foreign.store) == (False, True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_continue_the_tokens_of_their_parents(pool: LocalPool, engine: FakeEngine, stream: bool) -> None:
    engine.replies.extend(REPLIES)
    bridge = ThinkingPolicy.ALL
    async with (
        serve_gateway(pool, [engine.url], response_length=256, bridge=bridge) as url,
        agent_of(url) as agent,
    ):
        await run_responses(agent, stream=stream)
        await agent.complete()
    steps = pool.taken()
    assert [step.prompt_made for step in steps] == ["rendered: first_turn", "bridged", "bridged"]
    for step, parent in zip(steps[1:], steps, strict=False):
        tokens_before = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
        assert step.prompt_ids.tolist()[: len(tokens_before)] == tokens_before


async def test_events_reach_the_client_before_the_engine_has_ended(agent: Agent, engine: FakeEngine) -> None:
    engine.replies.append(Reply("all well", reasoning="hm"))
    engine.faults = Faults(silent_s=FOR_EVER, silent_at_token=12)
    seen: list[str] = []
    async with asyncio.timeout(20):
        stream = await agent.client.responses.create(model="tiny", input="how?", stream=True)
        async for event in stream:
            seen.append(event.type)
            if event.type == "response.reasoning_text.delta":
                break
    assert engine.in_flight == 1
    assert seen == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        "response.reasoning_text.delta",
    ]
    await stream.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_an_engine_broke_off_is_carried_on(
    agent: Agent, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = Faults(abort_at_token=3, times=1)
    engine.replies.extend([Reply("all well"), Reply(" well")])
    response = await respond(agent, [{"role": "user", "content": "how?"}], stream=stream)
    assert (response.output_text, response.status, response.usage.output_tokens) == ("all well", "completed", 9)
    await agent.complete()
    (step,) = pool.taken()
    assert step.response_ids.tolist() == [*encode("all well"), END_OF_TURN]


async def test_a_stream_that_fails_ends_with_the_failed_response(agent: Agent, engine: FakeEngine) -> None:
    engine.replies.append(Reply("all well"))
    engine.faults = Faults(error_at_token=2)
    stream = await agent.client.responses.create(model="tiny", input="how?", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.status, last.response.error.message) == ("failed", "Internal server error")


async def test_what_is_not_there_is_refused_with_what_to_do(agent: Agent) -> None:
    with pytest.raises(openai.BadRequestError, match="send the whole input instead") as refused:
        await agent.client.responses.create(model="tiny", input="how?", previous_response_id="resp_1")
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError, match="the model `gpt-5` does not exist here"):
        await agent.client.responses.create(model="gpt-5", input="how?")
    refusals = 'stepwell_calls_refused_total{code="%s",kind="responses"}'
    assert await agent.metric(refusals % "previous_response_not_found") == 1
    assert await agent.metric(refusals % "model_not_found") == 1


async def test_the_tokens_of_an_input_are_counted_without_a_step(
    agent: Agent, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.replies.append(Reply("all well"))
    count = await agent.client.responses.input_tokens.count(model="tiny", input="how?", instructions="Be brief.")
    await agent.client.responses.create(model="tiny", input="how?", instructions="Be brief.")
    await agent.complete()
    (step,) = pool.taken()
    assert count.input_tokens == len(step.prompt_ids)


async def test_a_call_of_the_harness_itself_is_marked(agent: Agent, engine: FakeEngine) -> None:
    engine.replies.append(Reply("a summary"))
    asked = "You are performing a CONTEXT CHECKPOINT COMPACTION. Write a summary."
    await respond(agent, [{"role": "user", "content": [{"type": "input_text", "text": asked}]}], stream=False)
    assert await agent.metric('stepwell_untrainable_total{reason="side_call"}') == 1


async def test_an_unrecorded_response_has_its_tokens(agent: Agent, engine: FakeEngine) -> None:
    engine.replies.append(Reply("all well"))
    async with agent.http.post("/unrecorded/v1/responses", json={"model": "tiny", "input": "how?"}) as answer:
        told = await answer.json()
    assert answer.status == 200
    assert told["output"][0]["content"][0]["text"] == "all well"
    assert told["sampled"]["token_ids"] == [*encode("all well"), END_OF_TURN]
    assert told["sampled"]["exactness"] == "engine"
    assert len(told["sampled"]["logprobs"]["content"]) == 9
    assert told["sampled"]["prompt_token_ids"]
