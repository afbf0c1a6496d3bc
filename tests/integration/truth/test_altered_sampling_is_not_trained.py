"""T5: what was sampled from another distribution than the policy's is left out on every path, and said once, loudly.

Before, strict tools, a single allowed call, truncation and images were trained, and /submit_steps checked nothing.
"""

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from stepwell.gateway.dialects.request_rules import SamplingPolicy

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, agent_of
from stepwell.pool.api.stats import StepCount

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
STRICT_TOOL = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HELLO_PART = {"type": "text", "text": "hello"}
UNNAMED_IMAGES: list[dict[str, Any]] = [
    {"image_url": "data:image/png;base64,AAAA"},
    {"image_url": {"url": "data:image/png;base64,AAAA"}},
    {"video_url": "data:video/mp4;base64,AAAA"},
    {"image_embeds": "x"},
    {"input_audio": {"data": "x", "format": "wav"}},
    {**HELLO_PART, "uuid": "u", "image_url": "data:image/png;base64,AAAA"},
]
"""vLLM takes each of them for data, although none says so in its type."""
ALTERED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.9}, "truncated"),
    ({"extra_body": {"top_k": 20}}, "truncated"),
    ({"extra_body": {"min_p": 0.1}}, "truncated"),
    ({"tools": [STRICT_TOOL]}, "constrained"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "constrained"),
    ({"extra_body": {"thinking_token_budget": 5}}, "constrained"),
    ({"extra_body": {"ignore_eos": True}}, "constrained"),
    ({"temperature": 0.005}, "greedy"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}, IMAGE]}]}, "multimodal"),
    *(({"messages": [{"role": "user", "content": [HELLO_PART, part]}]}, "multimodal") for part in UNNAMED_IMAGES),
]
STEP: dict[str, Any] = {
    "prompt_ids": [1],
    "response_ids": [2],
    "response_logprobs": [-0.5],
    "trajectory_uid": "t",
    "prompt_uid": "p",
    "step_index": 0,
    "is_last": True,
}


@pytest.mark.parametrize(("asked", "kind"), ALTERED)
async def test_an_agents_step_is_marked_with_its_kind(
    pool: LocalPool, engine: FakeEngine, asked: dict[str, Any], kind: str
) -> None:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        await agent.ask(**asked)
        await agent.complete()
    (step,) = pool.taken()
    assert str(step.untrainable).split(":")[0] == kind


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [({"temperature": 0}, "greedy"), ({"top_p": 0.5}, "truncated"), ({"min_tokens": 2}, "constrained")],
)
async def test_a_submitted_step_is_marked_too(
    pool: LocalPool, engine: FakeEngine, sampling: dict[str, Any], kind: str
) -> None:
    async with (
        serve_gateway(pool, [engine.url]) as url,
        aiohttp.ClientSession(url) as http,
        http.post("/submit_steps", json={"steps": [{**STEP, "sampling": sampling}]}) as answer,
    ):
        assert (await answer.json())["accepted"] == 1
    (step,) = pool.taken()
    assert str(step.untrainable).split(":")[0] == kind


async def test_the_first_of_each_kind_is_said_in_the_log(
    pool: LocalPool, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url, channel="mine") as agent:
        for asked in ({"top_p": 0.9}, {"top_p": 0.8}, {"temperature": 0}):
            await agent.ask(**asked)
    said = [line.getMessage() for line in caplog.records if "left out of training" in line.getMessage()]
    assert ["truncated: top_p is 0.9" in said[0], "greedy: temperature is 0" in said[1]] == [True, True]
    assert [line.startswith("channel mine: ") for line in said] == [True, True]


async def test_the_pool_notes_the_share_of_a_channel_before_any_trainer_asks(
    pool: LocalPool, engine: FakeEngine
) -> None:
    async with serve_gateway(pool, [engine.url]) as url:
        for channel in ("train", "eval"):
            async with agent_of(url, channel=channel) as agent:
                for top_p in (1.0, 0.9) * 10:
                    await agent.ask(top_p=top_p)
                await agent.complete()
    channels = (await pool.stats()).channels
    assert channels["train"].recent == channels["eval"].recent == {"": 10, "truncated": 10}
    note = channels["train"].sampling_note("train")
    assert note is not None
    assert note.startswith("50% of the last 20 steps of channel train")
    assert channels["eval"].sampling_note("eval") is None
    trained = replace(channels["eval"], left_out={"truncated": StepCount(10, 100)})
    assert trained.sampling_note("eval") is not None


async def test_on_policy_sampling_replaces_what_the_agent_asks_in_its_channel_only(
    pool: LocalPool, engine: FakeEngine
) -> None:
    policies = {"train": SamplingPolicy(on_policy=True, temperature=0.8)}
    async with serve_gateway(pool, [engine.url], sampling=policies) as url:
        for channel in ("train", "eval"):
            async with agent_of(url, channel=channel) as agent:
                await agent.ask(temperature=0.1, top_p=0.9, tools=[STRICT_TOOL])
                await agent.complete()
    asked = [seen.body for seen in engine.requests if seen.path == "/v1/chat/completions"]
    assert [(body["temperature"], body["top_p"], body["tools"]) for body in asked] == [
        (0.8, 1, [TOOL]),
        (0.1, 0.9, [STRICT_TOOL]),
    ]
    (trained,), (evaluated,) = pool.taken("train"), pool.taken("eval")
    assert (trained.temperature, trained.untrainable) == (0.8, None)
    assert trained.sampling["replaced"] == {"temperature": 0.1, "top_p": 0.9, "strict_tools": 1}
    assert (evaluated.temperature, evaluated.untrainable) == (0.1, "truncated: top_p is 0.9")


async def test_another_gateway_knows_the_channel_too(pool: LocalPool, engine: FakeEngine) -> None:
    policies = {"train": SamplingPolicy(on_policy=True)}
    opening, serving = (serve_gateway(pool, [engine.url], sampling=policies) for _ in range(2))
    async with (
        opening as first,
        serving as second,
        agent_of(first, channel="eval") as agent,
        aiohttp.ClientSession(second) as http,
        http.post(agent.chat, json={**HELLO, "temperature": 0.5}) as answer,
    ):
        assert answer.status == 200
    assert engine.requests[-1].body["temperature"] == 0.5
