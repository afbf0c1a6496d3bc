"""Anthropic's Messages API: a real gateway, the real anthropic package, and the fake engine, over real HTTP."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from stepwell.steps.step import Exactness, Step

FOR_EVER = 3600.0
CONTROL_KEY = "control-key-of-the-tests"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64}
SCRIPT = [
    Reply(
        "Let me see.",
        (ToolCall("add", {"a": 1}), ToolCall("add", {"b": [2.5, None], "é": "你好"})),
        reasoning="Two sums.",
    ),
    Reply("", (ToolCall("add", {"a": 3}),)),
    Reply("It is six.", reasoning="Done."),
]
RESULTS = {"Let me see.": ["1", "ok\n2"], "": ["3"]}


@asynccontextmanager
async def anthropic_of(agent: Agent, url: str, **key: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    given = key or {"api_key": agent.client.api_key}
    async with anthropic.AsyncAnthropic(base_url=f"{url}{agent.path}", max_retries=0, **given) as client:
        yield client


@pytest.fixture
async def url(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[str]:
    async with serve_gateway(pool, [engine.url], response_length=256) as url:
        yield url


@pytest.fixture
async def agent(url: str) -> AsyncIterator[Agent]:
    async with agent_of(url) as agent:
        yield agent


@pytest.fixture
async def client(agent: Agent, url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_of(agent, url) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool, **asked: Any) -> anthropic.types.Message:
    if not stream:
        message: anthropic.types.Message = await client.messages.create(**{**HELLO, **asked})
        return message
    async with client.messages.stream(**{**HELLO, **asked}) as streamed:
        return await streamed.get_final_message()


async def tool_loop(client: anthropic.AsyncAnthropic, *, stream: bool) -> list[anthropic.types.Message]:
    """Three turns, as an agent written for Anthropic's API makes them."""
    history, said = list(HELLO["messages"]), list[anthropic.types.Message]()
    while True:
        message = await ask(client, stream=stream, messages=history, tools=TOOLS, system="Be kind.", max_tokens=256)
        said.append(message)
        calls = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            return said
        text = "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(calls, RESULTS[text], strict=True)
        ]
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


async def chat_loop(client: openai.AsyncOpenAI) -> None:
    """The same, as an agent written for OpenAI's API makes them."""
    history: list[Any] = [{"role": "system", "content": "Be kind."}, *HELLO["messages"]]
    while True:
        asked = {"model": "tiny", "messages": history, "tools": CHAT_TOOLS, "max_tokens": 256}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        if not message.tool_calls:
            return
        history.append(message.model_dump(exclude_none=True))
        for call, result in zip(message.tool_calls, RESULTS[message.content or ""], strict=True):
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def tokens(steps: list[Step]) -> list[tuple[list[int], list[int], Any]]:
    return [
        (
            step.prompt_ids.tolist(),
            step.response_ids.tolist(),
            [] if step.response_logprobs is None else step.response_logprobs.tolist(),
        )
        for step in steps
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_is_recorded_with_the_ids_of_the_chat_path(
    url: str, agent: Agent, client: anthropic.AsyncAnthropic, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.replies.extend(SCRIPT * 2)
    first, second, third = await tool_loop(client, stream=stream)
    await agent.complete()
    steps = pool.taken()
    async with agent_of(url) as chatting:
        await chat_loop(chatting.client)
        await chatting.complete()
    assert tokens(steps) == tokens(pool.taken())
    assert all((step.exactness, step.quarantine, step.untrainable) == (Exactness.ENGINE, None, None) for step in steps)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in first.content[2:]] == [{"a": 1}, {"b": [2.5, None], "é": "你好"}]  # type: ignore[union-attr]
    assert [block.type for block in second.content] == ["tool_use"]
    assert (third.stop_reason, third.content[1].text) == ("end_turn", "It is six.")  # type: ignore[union-attr]
    for message, step in zip((first, second, third), steps, strict=True):
        assert message.id.startswith(f"msg_{step.uid}")
        used = message.usage.input_tokens, message.usage.output_tokens
        assert used == (len(step.prompt_ids), len(step.response_ids))


async def test_the_history_goes_to_the_engine_with_the_engines_own_ids(
    client: anthropic.AsyncAnthropic, engine: FakeEngine
) -> None:
    engine.replies.extend(SCRIPT)
    await tool_loop(client, stream=True)
    history = engine.requests[-1].body["messages"]
    ids = [call["id"] for message in history for call in message.get("tool_calls") or []]
    assert len(ids) == 3
    assert all(call_id.startswith("chatcmpl-tool-") and len(call_id) < 64 for call_id in ids)
    assert [message["tool_call_id"] for message in history if message["role"] == "tool"] == ids


async def test_several_events_reach_the_client_before_the_engine_has_ended(
    client: anthropic.AsyncAnthropic, engine: FakeEngine
) -> None:
    engine.replies.append(Reply("hello", reasoning="hm"))
    engine.faults = Faults(silent_s=FOR_EVER, silent_at_token=7)
    async with await client.messages.create(**HELLO, stream=True) as stream:
        kinds = [(await anext(stream)).type for _ in range(9)]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta", "content_block_delta"),
    ]
    assert engine.in_flight == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_and_limits_are_told(
    client: anthropic.AsyncAnthropic, engine: FakeEngine, stream: bool
) -> None:
    engine.replies.extend([Reply("one STOP two"), Reply("one two three")])
    stopped = await ask(client, stream=stream, stop_sequences=["STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "STOP", "one ")  # type: ignore[union-attr]
    cut = await ask(client, stream=stream, max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_an_engine_broke_off_is_carried_on(
    agent: Agent, client: anthropic.AsyncAnthropic, pool: LocalPool, engine: FakeEngine, stream: bool
) -> None:
    engine.faults = Faults(abort_at_token=3, times=1)
    engine.replies.extend([Reply("all well STOP"), Reply(" well STOP and more")])
    message = await ask(client, stream=stream, stop_sequences=["STOP"])
    assert (message.content[0].text, message.stop_sequence) == ("all well ", "STOP")  # type: ignore[union-attr]
    await agent.complete()
    (step,) = pool.taken()
    assert message.usage.output_tokens == len(step.response_ids)


async def test_a_count_of_tokens_is_that_of_the_call_and_is_not_recorded(
    agent: Agent, client: anthropic.AsyncAnthropic, pool: LocalPool, engine: FakeEngine
) -> None:
    asked = {"model": "tiny", "messages": HELLO["messages"], "tools": TOOLS, "system": "Be kind."}
    count = await client.messages.count_tokens(**asked)
    message = await ask(client, stream=False, **asked)
    assert count.input_tokens == message.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="messages must be"):
        await client.messages.count_tokens(model="tiny", messages=[])
    assert await agent.metric('stepwell_calls_total{kind="messages_count",status="200"}') == 1
    await agent.complete()
    assert len(pool.taken()) == 1


async def test_an_engine_that_counts_no_tokens_says_so(pool: LocalPool) -> None:
    async with (
        FakeEngine(plain=True) as plain,
        serve_gateway(pool, [plain.url]) as url,
        agent_of(url) as agent,
        anthropic_of(agent, url) as client,
    ):
        with pytest.raises(anthropic.BadRequestError, match="does not count tokens"):
            await client.messages.count_tokens(model="tiny", messages=HELLO["messages"])


async def test_errors_are_those_of_anthropics_package(
    url: str, agent: Agent, client: anthropic.AsyncAnthropic, engine: FakeEngine
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        await ask(client, stream=True, model="claude-x")
    with pytest.raises(anthropic.BadRequestError, match="has no input_schema"):
        await ask(client, stream=True, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await ask(client, stream=True, messages=[{"role": "user", "content": "x" * 40_000}])
    async with anthropic.AsyncAnthropic(base_url=f"{url}/no/one", api_key="x", max_retries=0) as stranger:
        with pytest.raises(anthropic.NotFoundError, match="no open trajectory"):
            await ask(stranger, stream=False)
    engine.faults = Faults(error_at_token=2)
    with pytest.raises(anthropic.APIStatusError, match="Internal server error"):
        await ask(client, stream=True)
    engine.faults = Faults(error_status=500)
    with pytest.raises(anthropic.InternalServerError) as failed:
        await ask(client, stream=False)
    assert failed.value.type == "api_error"


async def test_a_side_call_of_claude_code_is_marked(
    agent: Agent, client: anthropic.AsyncAnthropic, pool: LocalPool
) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00a;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
        {"type": "text", "text": "Generate a short kebab-case name (2-4 words) that captures the task."},
    ]
    await ask(client, stream=True, system=system)
    await ask(client, stream=True, system=system[:2])
    await agent.complete()
    assert [step.untrainable for step in pool.taken()] == ["side_call: title", None]


async def test_a_key_is_taken_from_either_header(pool: LocalPool, engine: FakeEngine) -> None:
    async with (
        serve_gateway(pool, [engine.url], control_keys=[CONTROL_KEY]) as url,
        agent_of(url, control_key=CONTROL_KEY) as agent,
    ):
        own = agent.client.api_key
        for key in ({"api_key": own}, {"auth_token": own}):
            async with anthropic_of(agent, url, **key) as client:
                assert (await ask(client, stream=False)).content
        both = {"Authorization": "Bearer of-another-server", "x-api-key": own}
        async with (
            aiohttp.ClientSession(url) as http,
            http.post(f"{agent.path}/v1/messages", json=HELLO, headers=both) as answer,
        ):
            assert answer.status == 200
        async with anthropic_of(agent, url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY"):
                await ask(client, stream=False)
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.count_tokens(model="tiny", messages=HELLO["messages"])


async def test_it_is_served_unrecorded_at_the_root(url: str, engine: FakeEngine) -> None:
    engine.replies.append(Reply("all well"))
    async with aiohttp.ClientSession(url) as http:
        async with http.post("/unrecorded/v1/messages", json=HELLO) as answer:
            message = json.loads(await answer.text())
        assert message["content"] == [{"type": "text", "text": "all well"}]
        engine.replies.append(Reply("all well"))
        async with http.post("/unrecorded/v1/messages", json={**HELLO, "stream": True}) as answer:
            assert (answer.status, "message_stop" in await answer.text()) == (200, True)
