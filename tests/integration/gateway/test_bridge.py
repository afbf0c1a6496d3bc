"""Calls that continue a recorded conversation: a real gateway and the fake engine, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from rig import chat_templates
from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import Agent, agent_of
from rig.waiting import until
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import pack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import Step

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = Reply("", (ToolCall("add", {"a": 1, "b": "ü"}),))
RENDER, PROBE = "/v1/chat/completions/render", 5
"""The engine's route, and the renderings by which a template is probed."""
USER = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "And <|im_end|> then?"}


class Conversation:
    """An agent that sends its whole history with each call, as agents do."""

    def __init__(self, agent: Agent, pool: LocalPool, *, stream: bool = False, **options: Any) -> None:
        self.agent = agent
        self.pool = pool
        self.messages: list[dict[str, Any]] = []
        self.stream = stream
        self.options = options

    async def ask(self, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The reply, which is added to the history."""
        self.messages += messages
        asked = {"messages": self.messages, "stream": self.stream, **self.options, **options}
        status, text = await self.agent.say(**asked)
        assert status == 200, text
        reply = joined(text) if self.stream else json.loads(text)["choices"][0]["message"]
        self.messages.append(reply)
        return reply

    async def answer_calls(self, text: str = "4") -> dict[str, Any]:
        calls = self.messages[-1]["tool_calls"]
        return await self.ask(*({"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls))

    async def steps(self) -> list[Step]:
        await self.agent.complete(reward=1.0)
        return self.pool.taken()


def joined(text: str) -> dict[str, Any]:
    """The message that a stream spells."""
    reply: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in filter(None, text.splitlines()):
        if line == "data: [DONE]":
            continue
        for delta in (piece["delta"] for piece in json.loads(line.removeprefix("data: "))["choices"]):
            reply["content"] += delta.get("content") or ""
            if delta.get("reasoning"):
                reply["reasoning"] = reply.get("reasoning", "") + delta["reasoning"]
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    named = {"id": call["id"], "type": "function", "function": {**call["function"], "arguments": ""}}
                    reply.setdefault("tool_calls", []).append(named)
                function = reply["tool_calls"][call["index"]]["function"]
                function["arguments"] += call["function"].get("arguments", "")
    return reply


@asynccontextmanager
async def conversing(
    engine: FakeEngine,
    pool: LocalPool,
    policy: ThinkingPolicy | None = ThinkingPolicy.TEMPLATE,
    *,
    stream: bool = False,
    **options: Any,
) -> AsyncIterator[Conversation]:
    options = {"max_tokens": 400, **options}
    async with serve_gateway(pool, [engine.url], bridge=policy, response_length=400) as url, agent_of(url) as agent:
        yield Conversation(agent, pool, stream=stream, **options)


def made(steps: list[Step]) -> list[str]:
    return [step.prompt_made for step in steps]


def row_count(steps: list[Step]) -> int:
    """Of one trajectory."""
    trajectory = np.zeros(len(steps), np.int64)
    return len(merge_rows(pack(steps), trajectory, np.zeros(1, np.int64)).trajectory_of_R)


def assert_continues(step: Step, parent: Step) -> None:
    tokens = [*parent.prompt_ids, *parent.response_ids]
    assert step.prompt_ids[: len(tokens)].tolist() == tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_are_sent_as_exact_ids_and_become_one_row(
    engine: FakeEngine, pool: LocalPool, stream: bool
) -> None:
    engine.replies.extend([CALL, Reply("So it is 4."), Reply("Good bye.")])
    async with conversing(engine, pool, stream=stream, tools=TOOLS) as talk:
        await talk.ask(USER)
        await talk.answer_calls()
        await talk.ask(NEXT)
        steps = await talk.steps()
        counted = await talk.agent.metric('stepwell_bridge_total{outcome="bridged"}')
    assert made(steps) == ["rendered: first_turn", "bridged", "bridged"]
    assert counted == 2
    for step, parent in zip(steps[1:], steps, strict=False):
        assert_continues(step, parent)
    assert row_count(steps) == 1
    sent = [seen.body for seen in engine.requests if seen.path == "/v1/chat/completions"]
    assert ["kv_transfer_params" in body for body in sent] == [False, True, True]
    # this template only appends, so that the ids are those of a plain rendering
    for body, step in zip(sent, steps, strict=True):
        assert engine.rendered(body) == step.prompt_ids.tolist()


@pytest.mark.parametrize("is_call", [False, True])
async def test_the_template_is_probed_before_the_agent_comes_back(
    engine: FakeEngine, pool: LocalPool, is_call: bool
) -> None:
    engine.replies.extend([CALL if is_call else Reply("Yes."), Reply("So it is 4.")])
    async with conversing(engine, pool, tools=TOOLS) as talk:
        await talk.ask({"role": "system", "content": "Be brief."}, USER)
        await until(lambda: engine.asked[RENDER] == PROBE, "the probe of the template")
        await (talk.answer_calls() if is_call else talk.ask(NEXT))
        assert made(await talk.steps())[1:] == ["bridged"]
    assert engine.asked[RENDER] == PROBE + 1


async def test_without_a_bridge_nothing_is_added_to_calls_and_steps(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool, None) as talk:
        await talk.ask(USER)
        await talk.ask(NEXT)
        steps = await talk.steps()
    assert [(step.prompt_made, step.lineage) for step in steps] == [("", {})] * 2
    assert all("kv_transfer_params" not in seen.body for seen in engine.requests)
    assert engine.asked[RENDER] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("policy", "outcomes", "rows"),
    [
        (ThinkingPolicy.ALL, ["bridged", "bridged", "bridged"], 1),
        (ThinkingPolicy.TOOL_CYCLE, ["bridged", "bridged", "rendered: thinking"], 2),
        (ThinkingPolicy.TEMPLATE, ["bridged", "bridged", "rendered: thinking"], 2),
        (None, ["", "", ""], 4),
    ],
)
async def test_thinking_stays_in_the_context_as_the_setting_says(
    pool: LocalPool, policy: ThinkingPolicy | None, outcomes: list[str], rows: int, stream: bool
) -> None:
    thinking = [Reply("", CALL.tool_calls, reasoning=f"thought {turn}") for turn in (1, 2)]
    replies = [*thinking, Reply("done", reasoning="thought 3"), Reply("bye", reasoning="thought 4")]
    async with (
        FakeEngine(replies=replies, template=chat_templates.stripping) as engine,
        conversing(engine, pool, policy, stream=stream, tools=TOOLS) as talk,
    ):
        await talk.ask(USER)
        await talk.answer_calls()
        await talk.answer_calls()
        await talk.ask(NEXT)
        steps = await talk.steps()
    assert made(steps)[1:] == outcomes
    assert row_count(steps) == rows
    assert [step.lineage.get("thinking") for step in steps] == [policy] * 4


async def test_thinking_that_the_client_drops_is_kept_only_if_the_setting_keeps_it(pool: LocalPool) -> None:
    for policy, outcome in ((ThinkingPolicy.TEMPLATE, "rendered: thinking"), (ThinkingPolicy.TOOL_CYCLE, "bridged")):
        replies = [Reply("", CALL.tool_calls, reasoning="hm"), Reply("done")]
        async with (
            FakeEngine(replies=replies, template=chat_templates.stripping) as engine,
            conversing(engine, pool, policy, tools=TOOLS) as talk,
        ):
            reply = await talk.ask(USER)
            for name in ("reasoning", "reasoning_content"):
                del reply[name]
            await talk.answer_calls()
            steps = await talk.steps()
        assert made(steps)[1:] == [outcome]


async def test_an_edited_reply_is_rendered_and_the_next_turn_continues_it(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool) as talk:
        reply = await talk.ask(USER)
        reply["content"] += "!"
        await talk.ask(NEXT)
        await talk.ask(NEXT)
        steps = await talk.steps()
    assert made(steps)[1:] == ["rendered: edited", "bridged"]


async def test_a_repeated_call_continues_the_same_parent(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool) as talk:
        await talk.ask(USER)
        for seed in (1, 2):
            await talk.ask(NEXT, seed=seed)
            del talk.messages[-2:]
        steps = await talk.steps()
    assert made(steps)[1:] == ["bridged", "bridged"]
    for step in steps[1:]:
        assert_continues(step, steps[0])


async def test_parallel_calls_of_one_conversation_are_forks_of_it(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool) as talk:
        await talk.ask(USER)
        forks = [Conversation(talk.agent, pool, **talk.options) for _ in range(4)]
        for fork in forks:
            fork.messages = list(talk.messages)
        await asyncio.gather(*(fork.ask({**USER, "content": f"fork {k}"}) for k, fork in enumerate(forks)))
        await asyncio.gather(*(fork.ask(NEXT) for fork in forks))
        steps = await talk.steps()
    assert made(steps)[1:] == ["bridged"] * 8
    assert row_count(steps) == 4


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"tools": TOOLS}, "tools_changed"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "template_changed"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "options"),
    ],
)
async def test_a_call_whose_prompt_begins_otherwise_is_rendered(
    engine: FakeEngine, pool: LocalPool, change: dict[str, Any], outcome: str
) -> None:
    async with conversing(engine, pool) as talk:
        await talk.ask(USER)
        await talk.ask(NEXT, **change)
        steps = await talk.steps()
    assert made(steps)[1:] == [f"rendered: {outcome}"]


async def test_a_reply_that_was_cut_off_is_rendered(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool, max_tokens=3) as talk:
        await talk.ask(USER)
        await talk.ask(NEXT)
        steps = await talk.steps()
    assert [step.finish_reason for step in steps] == ["length"] * 2
    assert made(steps)[1:] == ["rendered: cut_short"]


async def test_a_reply_that_a_stop_string_ended_is_rendered(engine: FakeEngine, pool: LocalPool) -> None:
    engine.replies.append(Reply("one two three"))
    async with conversing(engine, pool, stop=["two"]) as talk:
        await talk.ask(USER)
        await talk.ask(NEXT)
        steps = await talk.steps()
    assert made(steps)[1:] == ["rendered: close_differs"]


async def test_an_image_is_rendered(engine: FakeEngine, pool: LocalPool) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    async with conversing(engine, pool) as talk:
        await talk.ask(USER)
        await talk.ask(image)
        steps = await talk.steps()
    assert made(steps)[1:] == ["rendered: media"]


async def test_ids_that_the_engine_does_not_use_are_noticed(pool: LocalPool) -> None:
    replies = [Reply("", CALL.tool_calls, reasoning="hm"), Reply("done")]
    async with (
        FakeEngine(replies=replies, template=chat_templates.stripping) as engine,
        conversing(engine, pool, ThinkingPolicy.ALL, tools=TOOLS) as talk,
    ):
        await talk.ask(USER)
        engine.takes_prompt_ids = False  # it has shown to the probe that it does
        talk.messages[-1].pop("reasoning")
        talk.messages[-1].pop("reasoning_content")
        await talk.answer_calls()
        steps = await talk.steps()
        chat = [seen.body for seen in engine.requests if seen.path == "/v1/chat/completions"]
        assert steps[1].prompt_ids.tolist() == engine.rendered(chat[1])
    assert made(steps)[1:] == ["rendered: echo_differs"]


async def test_an_engine_that_takes_no_ids_or_that_fails_to_render_gets_messages(pool: LocalPool) -> None:
    async with FakeEngine(takes_prompt_ids=False) as old, conversing(old, pool) as talk:
        await talk.ask(USER)
        await talk.ask(NEXT)
        steps = await talk.steps()
    assert [(step.prompt_made, step.lineage) for step in steps] == [("rendered: no_renderer", {})] * 2

    def moody(messages: Any, tools: Any, add_generation_prompt: bool) -> str:
        if "moody" in str(messages) or len(messages) == 2:
            raise KeyError("the template fails")
        return chat_templates.chatml(messages, tools, add_generation_prompt)

    async with FakeEngine(template=moody) as engine, conversing(engine, pool) as talk:
        await talk.ask(USER)
        await talk.ask(USER, NEXT)
        assert made(await talk.steps())[1:] == ["bridged"]


async def test_tokenize_renders_for_an_engine_without_scale_out(pool: LocalPool) -> None:
    async with FakeEngine(scale_out=False) as engine, conversing(engine, pool) as talk:
        await talk.ask(USER)
        await talk.ask(NEXT)
        assert made(await talk.steps())[1:] == ["bridged"]
        assert engine.asked["/tokenize"] > 0


async def test_a_tokenize_route_that_gives_other_ids_than_the_engine_used_is_not_believed(pool: LocalPool) -> None:
    async with FakeEngine(scale_out=False) as engine:
        engine.tokenizes_first = [7]
        async with conversing(engine, pool) as talk:
            await talk.ask(USER)
            await talk.ask(NEXT)
            assert made(await talk.steps())[1:] == ["rendered: unproven"]


async def test_a_clients_own_prompt_ids_never_reach_an_engine(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool, kv_transfer_params={"prompt_token_ids": [1, 2, 3]}) as talk:
        await talk.ask(USER)
        (step,) = await talk.steps()
    assert step.prompt_ids.tolist() != [1, 2, 3]
    assert "kv_transfer_params" not in engine.requests[-1].body


async def test_several_choices_can_each_be_continued(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool) as talk:
        status, text = await talk.agent.say(messages=[USER], n=2, **talk.options)
        assert status == 200, text
        for choice in json.loads(text)["choices"]:
            talk.messages = [USER, choice["message"]]
            await talk.ask(NEXT)
        steps = await talk.steps()
    assert made(steps) == ["rendered: first_turn"] * 2 + ["bridged"] * 2
    assert row_count(steps) == 2


async def test_ids_that_the_engine_refuses_are_replaced_by_the_messages(pool: LocalPool) -> None:
    """Thinking that a bridge keeps can be too much for the engine's window."""
    replies = [Reply("", CALL.tool_calls, reasoning="hm" * 160), Reply("done")]
    async with (
        FakeEngine(replies=replies, template=chat_templates.stripping) as engine,
        conversing(engine, pool, ThinkingPolicy.ALL, tools=TOOLS) as talk,
    ):
        await talk.ask(USER)
        for name in ("reasoning", "reasoning_content"):
            del talk.messages[-1][name]
        engine.max_model_len = 450
        assert (await talk.answer_calls())["content"] == "done"
        assert made(await talk.steps())[1:] == ["rendered: refused"]


async def test_a_second_gateway_and_a_restarted_one_continue_what_another_recorded(
    engine: FakeEngine, pool: LocalPool
) -> None:
    opened = {"trajectory_uid": "t", "prompt_uid": "p"}
    messages: list[dict[str, Any]] = []
    for _ in range(3):
        gateway = serve_gateway(pool, [engine.url], bridge=ThinkingPolicy.TEMPLATE)
        async with gateway as url, agent_of(url, **opened) as agent:
            talk = Conversation(agent, pool, max_tokens=64)
            talk.messages = messages
            await talk.ask(NEXT)
            await talk.ask(NEXT)
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url, **opened) as agent:
        steps = await Conversation(agent, pool).steps()
    assert made(steps)[1:] == ["bridged"] * 5
    assert row_count(steps) == 1


async def test_turns_join_although_each_call_goes_to_another_gateway(engine: FakeEngine, pool: LocalPool) -> None:
    """The step that a call continues may still be on its way from the other gateway."""
    opened, messages = {"trajectory_uid": "t", "prompt_uid": "p"}, list[dict[str, Any]]()
    other = PoolClient(pool.plan.name, transport=pool.transport)
    policy = ThinkingPolicy.TEMPLATE
    async with (
        serve_gateway(pool, [engine.url], bridge=policy) as one_url,
        serve_gateway(other, [engine.url], bridge=policy) as other_url,
        agent_of(one_url, **opened) as one_agent,
        agent_of(other_url, **opened) as other_agent,
    ):
        for turn in range(6):
            talk = Conversation((one_agent, other_agent)[turn % 2], pool, max_tokens=64)
            talk.messages = messages
            await talk.ask(NEXT)
        steps = await talk.steps()
    assert made(steps)[1:] == ["bridged"] * 5
    assert row_count(steps) == 1


async def test_while_the_pool_is_away_a_parent_is_found_in_memory_only(engine: FakeEngine, pool: LocalPool) -> None:
    async with conversing(engine, pool) as talk:
        await talk.ask(USER)
        pool.away = True
        await talk.ask(NEXT)
        talk.messages[1] = {"role": "assistant", "content": "edited"}
        await talk.ask(NEXT)
        assert await talk.agent.metric('stepwell_bridge_total{outcome="pool_away"}') == 1
        pool.away = False
        steps = await talk.steps()
    assert made(steps)[1:] == ["bridged", "rendered: pool_away"]


async def test_conversations_over_anthropics_messages_are_bridged(pool: LocalPool) -> None:
    tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    replies = [Reply("Let me see.", CALL.tool_calls, reasoning="hm"), Reply("", CALL.tool_calls), Reply("So it is 4.")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    policy = ThinkingPolicy.TOOL_CYCLE
    async with (
        FakeEngine(replies=replies, template=chat_templates.stripping) as engine,
        serve_gateway(pool, [engine.url], bridge=policy, response_length=400) as url,
        agent_of(url) as agent,
    ):
        for _ in replies:
            asked = {"model": "tiny", "max_tokens": 400, "system": "Be brief.", "messages": messages, "tools": tools}
            async with agent.http.post(f"{agent.path}/v1/messages", json=asked) as answered:
                answer = await answered.json()
                assert answered.status == 200, answer
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "4"} for call in calls]
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        steps = await Conversation(agent, pool).steps()
    assert made(steps)[1:] == ["bridged", "bridged"]
    assert row_count(steps) == 1


async def test_conversations_over_openais_responses_are_bridged(pool: LocalPool) -> None:
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    replies = [Reply("Let me see.", CALL.tool_calls, reasoning="hm"), Reply("", CALL.tool_calls), Reply("So it is 4.")]
    items: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    policy = ThinkingPolicy.TOOL_CYCLE
    async with (
        FakeEngine(replies=replies, template=chat_templates.stripping) as engine,
        serve_gateway(pool, [engine.url], bridge=policy, response_length=400) as url,
        agent_of(url) as agent,
    ):
        for _ in replies:
            asked = {"model": "tiny", "instructions": "Be brief.", "input": items, "tools": tools}
            async with agent.http.post(f"{agent.path}/v1/responses", json=asked) as answered:
                answer = await answered.json()
                assert answered.status == 200, answer
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "4"} for call in calls]
            items += [*answer["output"], *results]
        steps = await Conversation(agent, pool).steps()
    assert made(steps)[1:] == ["bridged", "bridged"]
    assert row_count(steps) == 1
