"""Where an agent's wishes meet the real engine's limits: its window, and its time once the agent has left."""

import asyncio
import contextlib
from typing import Any

import pytest
from openai import BadRequestError

from rig.vllm_server import VllmServer
from tests.e2e.episodes import Episode
from tests.e2e.weights import metric, take_time, until

Json = dict[str, Any]

WINDOW = 2048
SHORT: list[Any] = [{"role": "user", "content": "Hello!"}]
WRITTEN = "vllm:generation_tokens_total"
LONG = 1900
"""Tokens of an answer that its agent does not wait for."""
A_WHILE = 0.02
"""Seconds a token takes while an agent leaves, so that its answer is not over before."""
TOO_LONG: list[Any] = [{"role": "user", "content": "x" * 2 * WINDOW}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_beyond_the_window_is_openais_error_and_ends_the_episode(episode: Episode, stream: bool) -> None:
    await episode.agent.chat.completions.create(model="tiny", messages=SHORT, max_tokens=4)
    with pytest.raises(BadRequestError, match="maximum context length") as refused:
        await episode.agent.chat.completions.create(model="tiny", messages=TOO_LONG, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.type == "invalid_request_error"
    (step,) = await episode.steps()
    assert step.metadata["ended_by"] == "context_length_exceeded"


@pytest.mark.parametrize("asked", [{"max_tokens": 100_000}, {"max_completion_tokens": WINDOW + 1}, {}], ids=str)
async def test_more_tokens_than_the_window_holds_are_asked_for_and_as_many_as_fit_are_given(
    episode: Episode, asked: Json
) -> None:
    almost_full: list[Any] = [{"role": "user", "content": "x" * (WINDOW - 60)}]
    reply = await episode.agent.chat.completions.create(
        model="tiny", messages=almost_full, extra_body={"ignore_eos": True}, **asked
    )
    assert reply.choices[0].finish_reason == "length"
    (step,) = await episode.steps()
    assert len(step.prompt_ids) + len(step.response_ids) == WINDOW


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_that_leaves_frees_the_engine_at_once(episode: Episode, vllm: VllmServer, stream: bool) -> None:
    async def is_running() -> bool:
        return await metric(vllm, "vllm:num_requests_running") == 1

    async def is_free() -> bool:
        return await metric(vllm, "vllm:num_requests_running") == 0

    async def ask() -> None:
        asked: Json = {"model": "tiny", "messages": SHORT, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
        if not stream:
            await episode.agent.chat.completions.create(**asked)
            return
        async for _ in await episode.agent.chat.completions.create(stream=True, **asked):
            pass

    await take_time(vllm, A_WHILE)
    try:
        asking = asyncio.create_task(ask())
        await until(is_running, "the engine to work")
        before = await metric(vllm, WRITTEN)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(is_free, "the engine to be free")
        assert await metric(vllm, WRITTEN) - before < LONG / 10
    finally:
        await take_time(vllm, 0)
