"""New weights under running calls: agents see nothing of it, and every token knows which weights wrote it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rig.calls import get
from rig.gateways import GatewayProcess
from rig.vllm_server import VllmServer
from stepwell.steps.step import Step, VersionSpan
from tests.e2e.episodes import Episode, Heard
from tests.e2e.weights import NEW_LETTER, Weights, metric, paused, take_time, until

Json = dict[str, Any]

LONG = 1000
"""Tokens of an answer that is still being written when the weights change."""
WRITTEN = "vllm:generation_tokens_total"
SOME = 4
"""Tokens that each call has when the weights change."""
A_WHILE = 0.02
"""Seconds a token takes until then, so that no answer is over before."""
ASKED: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "seed": 7,
    "max_tokens": LONG,
}
PROMPT_IDS = list(b"Once upon a time\n")
FLAG_TOOL: Json = {
    "type": "function",
    "function": {"name": "flag", "parameters": {"type": "object", "properties": {"up": {"type": "boolean"}}}},
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Where weights change under running calls: from version 1 to version 2."""

    vllm: VllmServer
    gateway: GatewayProcess
    weights: Weights
    models: tuple[Path, Path]

    async def change(self, *, calls: int, mode: str) -> None:
        """New weights, once that many calls have some of their tokens; the rest comes at the engine's full speed."""
        await until(lambda: self._runs(calls), f"the engine to run {calls} calls")
        before = await metric(self.vllm, WRITTEN)

        async def have_tokens() -> bool:
            return await metric(self.vllm, WRITTEN) >= before + SOME * calls

        await until(have_tokens, "the engine to write")
        await self.weights.update(self.models[1], "2", mode=mode)
        await take_time(self.vllm, 0)

    async def _runs(self, calls: int) -> bool:
        return await metric(self.vllm, "vllm:num_requests_running") == calls

    async def assert_written_by_both(self, prompt_ids: list[int], ids: list[int], logprobs: Any, meeting: int) -> None:
        """The engine itself, asked under either weights, finds the tokens its own before `meeting` or from it on."""
        new = await self.weights.logprobs(prompt_ids, ids)
        await self.weights.update(self.models[0], "3")
        old = await self.weights.logprobs(prompt_ids, ids)
        np.testing.assert_allclose(logprobs[:meeting], old[:meeting], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logprobs[meeting:], new[meeting:], rtol=0, atol=1e-4)
        assert np.abs(old - new)[meeting - 1 : meeting + 1].min() > 1e-3, "too alike to tell where they meet"


@pytest.fixture
async def stage(
    vllm: VllmServer, gateway: GatewayProcess, weights: Weights, plain_models: tuple[Path, Path]
) -> AsyncIterator[Stage]:
    await take_time(vllm, A_WHILE)
    try:
        yield Stage(vllm, gateway, weights, plain_models)
    finally:
        await take_time(vllm, 0)


def text_of(step: Step) -> str:
    """What a plain model's ids spell."""
    return bytes(step.response_ids.tolist()).decode("ascii")


def meeting_of(spans: Sequence[VersionSpan], tokens: int) -> int:
    """Where two spans, of the old and of the new version, meet; they cover all tokens."""
    (old, start, meeting), (new, begin, end) = spans
    assert (old, start, new, begin, end) == (1, 0, 2, meeting, tokens)
    assert 0 < meeting < tokens
    return meeting


async def test_weights_that_change_under_a_generation_are_told_token_by_token(stage: Stage, episode: Episode) -> None:
    wanted = {"prompt_ids": PROMPT_IDS, "sampling_params": {"max_tokens": LONG, "seed": 1}}
    async with httpx.AsyncClient(timeout=120) as http:
        generating = asyncio.create_task(http.post(f"{stage.gateway.url}/generate", json=wanted))
        asking = asyncio.create_task(episode.ask(stream=True, **ASKED))
        await stage.change(calls=2, mode="keep")
        answer = (await generating).json()
    heard, _ = await asking
    (step,) = await episode.steps()
    assert answer["policy_version"] == 1
    meeting = meeting_of([VersionSpan(*span) for span in answer["version_spans"]], LONG)
    assert heard.finish_reason == "length"
    assert heard.text == text_of(step)
    assert len(step.response_ids) == LONG
    assert step.policy_version == 1
    assert step.extras["version_bracket"] == [1, 2]
    await stage.assert_written_by_both(PROMPT_IDS, answer["token_ids"], np.array(answer["log_probs"]), meeting)


async def test_a_chat_after_new_weights_has_their_version(stage: Stage, episode: Episode) -> None:
    asking = asyncio.create_task(episode.ask(stream=True, **ASKED))
    await stage.change(calls=1, mode="keep")
    await asking
    await stage.weights.known("2")
    await episode.ask(stream=False, **ASKED | {"max_tokens": 8})
    _, after = await episode.steps()
    assert after.policy_version == 2
    assert after.version_spans == (VersionSpan(2, 0, 8),)
    assert "version_bracket" not in after.extras


async def broken_off(stage: Stage, episode: Episode, *, stream: bool, **asked: Any) -> tuple[Step, Heard, int]:
    """A call that the engine broke off for new weights: its step, what the agent heard, and the tokens it counted."""
    asking = asyncio.create_task(episode.ask(stream=stream, **ASKED | asked))
    await stage.change(calls=1, mode="abort")
    heard, count = await asking
    (step,) = await episode.steps()
    assert step.policy_version == 1
    assert step.untrainable is None
    assert count == len(step.response_ids)
    ids = step.response_ids.tolist()
    meeting = meeting_of(step.version_spans, len(ids))
    await stage.assert_written_by_both(step.prompt_ids.tolist(), ids, step.response_logprobs, meeting)
    return step, heard, count


@pytest.mark.parametrize("asked", [{}, {"tools": [FLAG_TOOL], "logprobs": True}], ids=["text", "tools and logprobs"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_the_engine_breaks_off_is_carried_on_into_one_step(
    stage: Stage, episode: Episode, stream: bool, asked: Json
) -> None:
    step, heard, count = await broken_off(stage, episode, stream=stream, **asked)
    assert count == LONG
    assert heard.text == text_of(step)
    assert heard.finish_reason == step.finish_reason == "length"
    assert not heard.tools
    assert heard.logprobs == pytest.approx(step.response_logprobs if "logprobs" in asked else [], abs=1e-5)


STOPS: dict[str, Json] = {
    "string": {"stop": [NEW_LETTER, "a longer one"]},
    "token": {"extra_body": {"stop_token_ids": [ord(NEW_LETTER)]}},
}


@pytest.mark.parametrize("by", STOPS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_stop_ends_an_answer_that_was_carried_on_and_is_not_heard(
    stage: Stage, episode: Episode, stream: bool, by: str
) -> None:
    step, heard, _ = await broken_off(stage, episode, stream=stream, **STOPS[by])
    assert heard.finish_reason == step.finish_reason == "stop"
    assert heard.text + NEW_LETTER == text_of(step)


async def test_calls_made_while_the_engine_is_paused_are_answered_once_it_resumes(
    vllm: VllmServer, gateway: GatewayProcess, episode: Episode, weights: Weights
) -> None:
    async def is_paused() -> bool:
        return "paused" in [engine["state"] for engine in (await get(f"{gateway.url}/engines")).json()["engines"]]

    wanted = {"prompt_ids": PROMPT_IDS, "sampling_params": {"max_tokens": 8}}
    async with httpx.AsyncClient(timeout=120) as http:
        async with paused(vllm):
            await until(is_paused, "the gateway to know of the pause")
            asking = asyncio.create_task(episode.ask(stream=True, **ASKED | {"max_tokens": 8}))
            generating = asyncio.create_task(http.post(f"{gateway.url}/generate", json=wanted))
            answered, _ = await asyncio.wait([asking, generating], timeout=0.3)
            assert not answered
        assert len((await generating).json()["token_ids"]) == 8
    assert (await asking)[1] == 8
    (step,) = await episode.steps()
    assert step.version_spans == (VersionSpan(1, 0, 8),)
