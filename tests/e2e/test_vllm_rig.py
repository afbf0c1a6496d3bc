"""The rig against the real vLLM: the fake engine speaks as it does, and new weights reach all of it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rig.calls import Answer, get, post
from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.reference_logprobs import reference_logprobs
from rig.tiny_model import make_tiny_model
from rig.vllm_server import VllmServer
from tests.e2e.weights import reload_weights

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"

ASKED: Json = {"model": "tiny", "max_tokens": 24, "seed": 1}
ASKED_CHAT: Json = ASKED | {"messages": [{"role": "user", "content": "hi"}]}
ASKED_COMPLETION: Json = ASKED | {"prompt": [104, 105]}
ASKED_TOKENS: Json = {"token_ids": [104, 105], "sampling_params": {"max_tokens": 24, "seed": 1}}
WITH_IDS: Json = {"return_token_ids": True}
STREAMED: Json = {"stream": True}
WITH_USAGE: Json = STREAMED | {"stream_options": {"include_usage": True}}

REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, ASKED_CHAT),
    "chat, ids": (CHAT, ASKED_CHAT | WITH_IDS | {"logprobs": True}),
    "chat, top 2 of 2": (CHAT, ASKED_CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    "chat, streamed": (CHAT, ASKED_CHAT | STREAMED),
    "chat, streamed, ids": (CHAT, ASKED_CHAT | WITH_USAGE | WITH_IDS | {"logprobs": True}),
    "completion": (COMPLETIONS, ASKED_COMPLETION | {"prompt": "hi"}),
    "completion, ids": (COMPLETIONS, ASKED_COMPLETION | WITH_IDS | {"logprobs": 0}),
    "completion, streamed": (COMPLETIONS, ASKED_COMPLETION | STREAMED),
    "completion, streamed, ids": (COMPLETIONS, ASKED_COMPLETION | WITH_USAGE | WITH_IDS | {"logprobs": 0}),
    "generate": (GENERATE, ASKED_TOKENS),
    "generate, ids": (GENERATE, ASKED_TOKENS | WITH_IDS | {"sampling_params": {"max_tokens": 24, "logprobs": 2}}),
    "generate, streamed": (GENERATE, ASKED_TOKENS | STREAMED),
    "generate, streamed, ids": (GENERATE, ASKED_TOKENS | WITH_USAGE | WITH_IDS),
    "unknown model": (CHAT, ASKED_CHAT | {"model": "another"}),
    "no messages": (CHAT, ASKED),
    "prompt too long": (COMPLETIONS, ASKED_COMPLETION | {"prompt": [104] * 3000}),
    "prompt and reply too long": (CHAT, ASKED_CHAT | {"max_tokens": 2040}),
    "reply too long": (CHAT, ASKED_CHAT | {"max_tokens": 5000}),
}

KEYED_BY_TOKEN = {"choices[].logprobs.top_logprobs[]"}
"""Objects whose keys are data."""


def outline(value: Any, path: str = "") -> Iterator[str]:
    """Every path that occurs in a JSON value, with the kind of thing found there."""
    if isinstance(value, dict) and path not in KEYED_BY_TOKEN:
        for key, inner in value.items():
            yield from outline(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        yield f"{path}: list"
        for inner in value:
            yield from outline(inner, f"{path}[]")
    else:
        yield f"{path}: {type(value).__name__}"


def outlines(answer: Answer, streamed: bool) -> list[set[str]]:
    """An answer's outline; of a stream the first chunk's, all of those between, and the last one's."""
    if not streamed:
        return [set(outline(answer.json()))]
    first, *between, last = answer.chunks()
    return [set(outline(first)), {path for chunk in between for path in outline(chunk)}, set(outline(last))]


async def not_joined(url: str, body: Json) -> Answer:
    """vLLM joins what it samples while it cannot send. On a busy machine a stream may have nothing between its first
    chunk and its last ones; that one says nothing about the shape of the others, so another one is asked for."""
    async with asyncio.timeout(120):
        while True:
            answer = await post(url, body)
            if "stream" not in body or answer.status != 200 or len(answer.chunks()) > 3:
                return answer


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_fake_engine_answers_in_vllms_shape(vllm: VllmServer, name: str) -> None:
    path, body = REQUESTS[name]
    async with FakeEngine(max_model_len=2048) as fake:
        faked, real = await post(fake.url + path, body), await not_joined(vllm.url + path, body)
    assert faked.status == real.status
    assert outlines(faked, "stream" in body) == outlines(real, "stream" in body)
    assert faked.events()[-1:] == real.events()[-1:] or "stream" not in body


@pytest.mark.parametrize("path", ["/version", "/weight_info", "/is_paused"])
async def test_the_fake_engine_tells_the_same_of_itself(vllm: VllmServer, path: str) -> None:
    async with FakeEngine() as fake:
        assert (await get(fake.url + path)).json() == (await get(vllm.url + path)).json()


FLAG_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "flag",
        "description": "Raise or lower the flag.",
        "parameters": {
            "type": "object",
            "properties": {"up": {"type": "boolean"}},
            "required": ["up"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fake_engine_calls_tools_in_vllms_shape(vllm: VllmServer, stream: bool) -> None:
    strict = FLAG_TOOL | {"function": FLAG_TOOL["function"] | {"strict": True}}
    asked = ASKED_CHAT | WITH_IDS | {"max_tokens": 800, "tools": [strict], "tool_choice": "required", "stream": stream}
    real = await post(vllm.url + CHAT, asked | {"seed": await seed_of_tool_calls(vllm, asked)})
    async with FakeEngine(replies=[Reply("", (ToolCall("flag", {"up": True}),))]) as fake:
        faked = await post(fake.url + CHAT, asked)
    assert outlines(faked, stream) == outlines(real, stream)


async def seed_of_tool_calls(vllm: VllmServer, asked: Json) -> int:
    """A seed with which the random model ends its calls in time."""
    for seed in range(30):
        answer = (await post(vllm.url + CHAT, asked | {"seed": seed, "stream": False})).json()
        if answer["choices"][0]["finish_reason"] == "tool_calls":
            return seed
    pytest.fail("no seed led to a tool call")


async def test_the_fake_engine_renders_the_prompt_that_vllm_renders(vllm: VllmServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "flag", "arguments": '{"up":  true}'}}
    messages = [
        {"role": "system", "content": "You raise flags. 🚩"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hissez"}, {"type": "text", "text": "le drapeau, e\u0301!"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "up"},
    ]
    asked = ASKED_CHAT | WITH_IDS | {"messages": messages, "tools": [FLAG_TOOL]}
    async with FakeEngine() as fake:
        faked, real = await post(fake.url + CHAT, asked), await post(vllm.url + CHAT, asked)
    assert faked.json()["prompt_token_ids"] == real.json()["prompt_token_ids"]


async def test_a_seeded_chat_repeats_exactly(vllm: VllmServer) -> None:
    asked = ASKED_CHAT | WITH_IDS | {"logprobs": True, "max_tokens": 64}
    first, second = [(await post(vllm.url + CHAT, asked)).json() for _ in range(2)]
    assert first["choices"] == second["choices"]


async def test_padded_ids_are_never_sampled(vllm: VllmServer) -> None:
    asked = ASKED_TOKENS | {"sampling_params": {"max_tokens": 500, "n": 8, "ignore_eos": True, "seed": 0}}
    answer = (await post(vllm.url + GENERATE, asked)).json()
    assert max(max(choice["token_ids"]) for choice in answer["choices"]) < 267


async def test_new_weights_reach_every_layer(vllm: VllmServer, tiny_model: Path, tmp_path: Path) -> None:
    other_model = make_tiny_model(tmp_path, seed=1)
    before = await generated(vllm)
    assert_written_by(tiny_model, before, version="default")
    try:
        await reload_weights(vllm, other_model, "7")
        assert_written_by(other_model, await generated(vllm), version="7")
    finally:
        await reload_weights(vllm, tiny_model, "default")
    assert await generated(vllm) == before


PROMPT_IDS = list(b"Which weights are these? A prompt of some length lets all of them speak.")


async def generated(vllm: VllmServer) -> Json:
    asked = {"token_ids": PROMPT_IDS, "sampling_params": {"max_tokens": 100, "seed": 3, "logprobs": 0}}
    choice: Json = (await post(vllm.url + GENERATE, asked)).json()["choices"][0]
    return choice


def assert_written_by(model: Path, choice: Json, *, version: str) -> None:
    reported = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = reference_logprobs(model, PROMPT_IDS, choice["token_ids"])
    np.testing.assert_allclose(reported, expected, rtol=0, atol=1e-4)
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": len(reported)}]
