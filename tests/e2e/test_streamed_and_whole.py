"""The same seeded request, streamed and not: the same answer for the agent, the same step for the trainer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai.types import Completion

from stepwell.steps.step import Exactness, Step
from tests.e2e.episodes import Episode, heard_streamed, heard_whole

Json = dict[str, Any]

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Wie geht's?"}, {"type": "text", "text": "你好 🙂"}]},
]
ASKED: Json = {"model": "tiny", "max_tokens": 48, "seed": 11}
USAGE: Json = {"stream_options": {"include_usage": True}}

CHATS: dict[str, Json] = {
    "plain": {},
    "two choices": {"n": 2},
    "stop strings": {"stop": ["a", "e", "</tool_call>"], "max_tokens": 400},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "other sampling": {"temperature": 0.7, "top_p": 0.9, "extra_body": {"top_k": 50}},
}

COMPLETIONS: dict[str, Json] = {
    "text": {"prompt": "Once upon a time"},
    "ids": {"prompt": list(b"Once upon a time")},
    "several prompts, two choices each": {"prompt": ["Once", "upon a time"], "n": 2},
    "stop strings, log-probabilities": {"prompt": "Once", "stop": ["a", "e"], "logprobs": 2, "max_tokens": 400},
}


def assert_same(whole: Sequence[Step], streamed: Sequence[Step]) -> None:
    for one, other in zip(whole, streamed, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.response_logprobs is not None
        assert other.response_logprobs is not None
        np.testing.assert_allclose(one.response_logprobs, other.response_logprobs, rtol=0, atol=1e-5)
        assert one.finish_reason == other.finish_reason
        assert one.sampling == other.sampling
        assert one.exactness is other.exactness is Exactness.ENGINE
        reason = None if one.sampling["top_p"] == 1 else "truncated: top_p is 0.9"
        assert one.untrainable == other.untrainable == reason


@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_is_the_same_streamed_and_whole(episode: Episode, name: str) -> None:
    asked: Json = ASKED | CHATS[name]
    reply = await episode.agent.chat.completions.create(messages=MESSAGES, **asked)
    stream = await episode.agent.chat.completions.create(messages=MESSAGES, stream=True, **asked, **USAGE)
    chunks = [chunk async for chunk in stream]
    whole, streamed = heard_whole(reply), heard_streamed(chunks)
    assert [heard.text for heard in whole] == [heard.text for heard in streamed]
    assert [heard.finish_reason for heard in whole] == [heard.finish_reason for heard in streamed]
    assert reply.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens

    steps = await episode.steps()
    of_reply, of_stream = steps[: len(whole)], steps[len(whole) :]
    assert_same(of_reply, of_stream)
    assert sum(len(step.response_ids) for step in of_reply) == reply.usage.completion_tokens
    for step, one, other in zip(of_reply, whole, streamed, strict=True):
        told: Any = step.response_logprobs if "logprobs" in asked else []
        assert one.logprobs == pytest.approx(told, abs=1e-5)
        assert other.logprobs == pytest.approx(told, abs=1e-5)
    if "stop" in asked:
        assert whole[0].finish_reason == "stop"
        assert not any(word in whole[0].text for word in asked["stop"])


def texts(answers: Sequence[Completion]) -> list[str]:
    """What each choice says in all."""
    said: dict[int, str] = {}
    for choice in (choice for answer in answers for choice in answer.choices):
        said[choice.index] = said.get(choice.index, "") + choice.text
    return [said[index] for index in sorted(said)]


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_a_completion_is_the_same_streamed_and_whole(episode: Episode, name: str) -> None:
    asked: Json = ASKED | COMPLETIONS[name]
    reply = await episode.agent.completions.create(**asked)
    chunks = [chunk async for chunk in await episode.agent.completions.create(stream=True, **asked, **USAGE)]
    assert texts([reply]) == texts(chunks)
    steps = await episode.steps()
    of_reply, of_stream = steps[: len(reply.choices)], steps[len(reply.choices) :]
    assert_same(of_reply, of_stream)
    assert reply.usage is not None
    assert sum(len(step.response_ids) for step in of_reply) == reply.usage.completion_tokens
    prompts = asked["prompt"] if isinstance(asked["prompt"][0], str) and "n" in asked else [asked["prompt"]]
    expected = [list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in prompts]
    assert [step.prompt_ids.tolist() for step in of_reply[:: asked.get("n", 1)]] == expected


async def test_what_the_agent_did_not_ask_for_is_not_there(episode: Episode) -> None:
    asked = ASKED | {"messages": MESSAGES}
    whole = (await episode.http.post("/v1/chat/completions", json=asked)).text
    streamed = (await episode.http.post("/v1/chat/completions", json=asked | {"stream": True})).text
    for answer in (whole, streamed):
        assert "token_ids" not in answer
        assert '"logprob"' not in answer
    assert '"usage"' not in streamed
    assert streamed.endswith("data: [DONE]\n\n")
