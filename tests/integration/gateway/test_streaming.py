"""Streamed calls: a real gateway, the real openai package, and the fake engine, over real HTTP; the pool in memory."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from stepwell.steps.trainable import fault_kind

from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.vocabulary import pieces
from rig.waiting import until
from stepwell.steps.columns import unpack
from stepwell.steps.step import Step

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}
FOR_EVER = 3600.0
"""Seconds: the engine would be busy until the end of the test, unless it is freed."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True)
class Agent:
    """An agent with its trajectory, and what the pool gets of it."""

    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    pool: LocalPool
    path: str

    async def stream(self, **wanted: Any) -> list[Any]:
        chunks = await self.client.chat.completions.create(**{**HELLO, **wanted}, stream=True)
        return [chunk async for chunk in chunks]

    async def raw(self, **wanted: Any) -> str:
        async with self.http.post(
            f"{self.path}/v1/chat/completions", json={**HELLO, "stream": True, **wanted}
        ) as reply:
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            return await reply.text()

    async def steps(self) -> list[Step]:
        async with self.http.post(f"{self.path}/v1/complete_trajectory", json={}) as ended:
            assert ended.status == 200, await ended.text()
        return self.pool.taken()

    async def kept(self) -> list[Step]:
        """Also those that no trainer gets."""
        async with self.http.post(f"{self.path}/v1/complete_trajectory", json={}) as ended:
            assert ended.status == 200, await ended.text()
        _, trajectory_uid, prompt_uid = self.path.split("/")
        return unpack(await self.pool.read([(trajectory_uid, prompt_uid)]), copy=True)

    async def quarantined(self) -> list[str]:
        """Why the steps of this trajectory are not trained."""
        await self.http.post(f"{self.path}/v1/complete_trajectory", json={})
        return list(self.pool.rules.stats().quarantined.elements())


@pytest.fixture
async def agent(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[Agent]:
    async with serve_gateway(pool, [engine.url]) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/init_trajectory", json={}) as opened:
            given = await opened.json()
        async with openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"], max_retries=0) as client:
            yield Agent(client, http, pool, f"/{given['trajectory_uid']}/{given['prompt_uid']}")


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def test_a_streamed_answer_is_the_unstreamed_one_in_pieces_and_both_are_the_same_step(agent: Agent) -> None:
    whole = await agent.client.chat.completions.create(**HELLO, seed=7)
    chunks = await agent.stream(seed=7)
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    first, second = await agent.steps()
    assert second.response_ids.tolist() == first.response_ids.tolist()
    assert second.prompt_ids.tolist() == first.prompt_ids.tolist()
    assert first.response_logprobs is not None
    assert second.response_logprobs is not None
    assert second.response_logprobs.tolist() == first.response_logprobs.tolist()


async def test_the_agent_sees_only_the_fields_it_asked_for(agent: Agent) -> None:
    plain = await agent.raw()
    assert plain.endswith("data: [DONE]\n\n")
    for hidden in ("token_ids", "prompt_token_ids", "usage", '"logprobs":{'):
        assert hidden not in plain
    shown = await agent.raw(logprobs=True, return_token_ids=True, stream_options={"include_usage": True})
    for asked in ('"token_ids":[', '"prompt_token_ids":[', '"completion_tokens":', '"logprobs":{'):
        assert asked in shown


async def test_chunks_reach_the_agent_before_the_answer_has_ended(agent: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(silent_s=FOR_EVER, silent_at_token=5)
    stream = await agent.client.chat.completions.create(**HELLO, stream=True)
    await anext(aiter(stream))
    assert engine.in_flight == 1
    await stream.close()


async def test_each_choice_of_a_stream_is_a_step(agent: Agent) -> None:
    chunks = await agent.stream(n=3)
    texts = {i: "".join(c.delta.content or "" for k in chunks for c in k.choices if c.index == i) for i in range(3)}
    assert len(set(texts.values())) == 3
    assert len(await agent.steps()) == 3


async def test_a_streamed_tool_call_round_trips(agent: Agent, engine: FakeEngine) -> None:
    engine.replies.extend([Reply("", (ToolCall("add", {"a": 1, "b": 2}),)), Reply("three")])
    calls = [
        c for chunk in await agent.stream(tools=TOOLS, max_tokens=64) for c in chunk.choices[0].delta.tool_calls or []
    ]
    name, arguments = calls[0].function.name, "".join(call.function.arguments or "" for call in calls)
    assert (name, arguments) == ("add", '{"a": 1, "b": 2}')
    said = {
        "role": "assistant",
        "tool_calls": [{"id": calls[0].id, "type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    heard = {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}
    chunks = await agent.stream(tools=TOOLS, messages=[*HELLO["messages"], said, heard])
    assert text_of(chunks) == "three"
    assert len(await agent.steps()) == 2


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (Faults(error_at_token=5), "cut_short"),
        (Faults(disconnect_at_token=5), "cut_short"),
        (Faults(malformed="not_json"), None),
        (Faults(malformed="no_choices"), None),
    ],
)
async def test_a_stream_that_fails_ends_in_an_openai_error_and_trains_nothing(
    agent: Agent, engine: FakeEngine, faults: Faults, kind: str | None
) -> None:
    engine.faults = faults
    with pytest.raises(openai.APIError):
        await agent.stream()
    assert await agent.quarantined() == ([kind] if kind else [])


async def test_a_stream_without_done_is_given_one(agent: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(no_done=True)
    assert (await agent.raw()).endswith("data: [DONE]\n\n")
    (step,) = await agent.steps()
    assert fault_kind(step.quarantine or "") == ""


async def test_a_client_that_leaves_frees_the_engine_and_leaves_a_step_cut_short(
    agent: Agent, engine: FakeEngine
) -> None:
    engine.faults = Faults(silent_s=FOR_EVER, silent_at_token=5)
    stream = await agent.client.chat.completions.create(**HELLO, stream=True)
    chunks = aiter(stream)
    for _ in range(3):
        await anext(chunks)
    await stream.close()
    await until(lambda: engine.in_flight == 0, "the engine to be free")
    (step,) = await agent.kept()
    assert (step.finish_reason, step.quarantine) == ("cut_short", None)
    assert fault_kind(step.untrainable or "") == "unseen"
    assert step.response_logprobs is not None
    assert 3 <= len(step.response_ids) == len(step.response_logprobs) <= 5


async def test_a_client_that_leaves_an_unstreamed_call_frees_the_engine(agent: Agent, engine: FakeEngine) -> None:
    engine.faults = Faults(delay_s=FOR_EVER)
    call = asyncio.create_task(agent.client.chat.completions.create(**HELLO))
    await until(lambda: engine.in_flight == 1, "the call to arrive")
    call.cancel()
    await until(lambda: engine.in_flight == 0, "the engine to be free")


@pytest.mark.parametrize("padding", [0, 300_000], ids=["a small request", "a request of several parts"])
async def test_a_client_that_leaves_a_later_call_of_its_connection_frees_the_engine(
    agent: Agent, engine: FakeEngine, padding: int
) -> None:
    assert "data: [DONE]" in await agent.raw()
    engine.faults = Faults(delay_s=FOR_EVER)
    body = json.dumps(HELLO).encode() + b" " * padding
    headers = {"Content-Type": "application/json"}
    call = asyncio.create_task(agent.http.post(f"{agent.path}/chat/completions", data=body, headers=headers))
    await until(lambda: engine.in_flight == 1, "the call to arrive")
    call.cancel()
    await until(lambda: engine.in_flight == 0, "the engine to be free")


async def test_a_refusal_of_the_engine_is_an_http_error_not_a_stream(agent: Agent) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await agent.stream(model="nope")


async def abort_and_resume(engine: FakeEngine, version: str) -> None:
    """A weight update that ends what is in flight, as a trainer makes it."""
    async with aiohttp.ClientSession(engine.url) as http:
        assert (await http.post("/pause?mode=abort")).status == 200
        assert (await http.post("/update_weight_version", json={"new_version": version})).status == 200
        assert (await http.post("/resume")).status == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_broken_off_by_a_weight_update_is_carried_on_into_one_step(
    agent: Agent, engine: FakeEngine, streamed: bool
) -> None:
    engine.weight_version = "3"
    engine.faults = Faults(token_delay_s=0.05)
    wanted: dict[str, Any] = {"extra_body": {"ignore_eos": True}}

    async def ask() -> tuple[str, str]:
        if streamed:
            chunks = await agent.stream(**wanted)
            return text_of(chunks), chunks[-1].choices[0].finish_reason
        (choice,) = (await agent.client.chat.completions.create(**HELLO, **wanted)).choices
        return choice.message.content or "", choice.finish_reason

    await until_version(agent, "3")
    asking = asyncio.create_task(ask())
    await until(lambda: engine.ticks_passed > 2, "the first tokens")
    await abort_and_resume(engine, "4")
    text, finish_reason = await asking
    (step,) = await agent.steps()
    assert (len(step.response_ids), finish_reason, step.finish_reason) == (24, "length", "length")
    assert text == "".join(pieces(step.response_ids.tolist()))
    assert step.quarantine is None
    assert step.policy_version == 3
    (old, new) = step.version_spans
    assert (old.version, old.start, new.version, new.end) == (3, 0, 4, 24)
    assert old.end == new.start > 0


async def until_version(agent: Agent, version: str) -> None:
    """Until the gateway has heard of it."""
    while True:
        async with agent.http.get("/engines") as reply:
            if (await reply.json())["engines"][0]["weight_version"] == version:
                return
