import json
from typing import Any

import pytest

from stepwell.engines.engine import Generated
from stepwell.engines.replies import RefusedReply
from stepwell.errors import EngineUnavailable
from stepwell.gateway.continuation import MOST_ABORTS, Continuation
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply, read_reply
from stepwell.gateway.dialects.sse import StreamReader
from stepwell.steps.step import VersionSpan, ids_array, logprobs_array
from stepwell.wire.openai import NO_USAGE, Sampled, Usage
from tests.unit.gateway.scripted_engines import ScriptedBody, ScriptedEngines
from tests.unit.wire.asking import VLLM, chat, completion


@pytest.fixture
def engines() -> ScriptedEngines:
    return ScriptedEngines()


@pytest.fixture
def continuation(engines: ScriptedEngines) -> Continuation:
    return Continuation(engines)


def more(*ids: int, end: str = "stop", version: int | None = 6, logprobs: bool = True) -> Generated:
    """A generation of those tokens."""
    values = logprobs_array([-1.0] * len(ids)) if logprobs else None
    spans = () if version is None else (VersionSpan(version, 0, len(ids)),)
    return Generated(Sampled(ids_array([]), ids_array(ids), values, end), NO_USAGE, spans)


def spelled(content: str | None, **message: Any) -> ScriptedBody:
    whole = {"choices": [{"message": {"role": "assistant", "content": content, **message}}]}
    return ScriptedBody(json.dumps(whole).encode())


def choice(*ids: int, end: str = "abort", index: int = 0) -> dict[str, Any]:
    logprobs = {"content": [{"logprob": -0.5} for _ in ids]}
    message = {"role": "assistant", "content": "half"}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": end, "token_ids": [*ids]}


def reply(call: ModelCall, *choices: dict[str, Any]) -> ChoicesReply:
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    return read_reply(
        json.dumps({"model": "m", "prompt_token_ids": [1, 2], "choices": choices, "usage": usage}).encode(), call, VLLM
    )


def stream(call: ModelCall, *deltas: dict[str, Any], end: str = "abort") -> StreamReader:
    """A stream of which each delta is a token, broken off after them."""
    reader = StreamReader(call, VLLM)
    chunks: list[dict[str, Any]] = [{"id": "x", "prompt_token_ids": [1, 2], "choices": []}]
    for token, delta in enumerate(deltas, start=7):
        logprobs = {"content": [{"logprob": -0.5}]}
        chunks.append({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "token_ids": [token]}]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    for chunk in chunks:
        reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return reader


async def test_an_answer_goes_on_from_its_tokens_into_one(engines: ScriptedEngines, continuation: Continuation) -> None:
    call = chat(temperature=0.5)
    engines.generations, engines.answers = [more(8, 9)], [spelled("half and half")]
    whole = await continuation.whole(call, reply(call, choice(7)), 5)
    ((context, sampling),) = engines.generated
    assert (context, sampling["temperature"], sampling["max_tokens"]) == ([1, 2, 7], 0.5, 63)
    (sampled,) = whole.choices
    assert sampled.response_ids.tolist() == [7, 8, 9]
    assert sampled.logprobs is not None
    assert sampled.logprobs.tolist() == [-0.5, -1.0, -1.0]
    assert (sampled.finish_reason, sampled.model) == ("stop", "m")
    assert sampled.version_spans == (VersionSpan(5, 0, 1), VersionSpan(6, 1, 3))
    assert whole.usage == Usage(2, 3)
    told = json.loads(whole.body())
    assert told["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert told["choices"][0]["message"]["content"] == "half and half"
    assert (told["choices"][0]["finish_reason"], told["choices"][0]["logprobs"]) == ("stop", None)
    assert "token_ids" not in told["choices"][0]


async def test_an_answer_may_be_broken_off_more_than_once(engines: ScriptedEngines, continuation: Continuation) -> None:
    engines.generations = [more(8, end="abort"), more(end="abort", version=None), more(9, version=7)]
    engines.answers = [spelled("whole")]
    whole = await continuation.whole(chat(), reply(chat(), choice(7)), 5)
    assert [context for context, _ in engines.generated] == [[1, 2, 7], [1, 2, 7, 8], [1, 2, 7, 8]]
    spans = (VersionSpan(5, 0, 1), VersionSpan(6, 1, 2), VersionSpan(7, 2, 3))
    assert (whole.choices[0].response_ids.tolist(), whole.choices[0].version_spans) == ([7, 8, 9], spans)


async def test_an_answer_broken_off_before_its_first_token_is_written_by_the_new_weights_alone(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    engines.generations, engines.answers = [more(8, 9)], [spelled("whole")]
    whole = await continuation.whole(chat(), reply(chat(), choice()), 5)
    assert whole.choices[0].version_spans == (VersionSpan(6, 0, 2),)


@pytest.mark.parametrize(("before", "after"), [(None, 6), (5, None)])
async def test_spans_are_told_only_if_every_token_has_one(
    engines: ScriptedEngines, continuation: Continuation, before: int | None, after: int | None
) -> None:
    engines.generations, engines.answers = [more(8, version=after)], [spelled("whole")]
    whole = await continuation.whole(chat(), reply(chat(), choice(7)), before)
    assert whole.choices[0].version_spans == ()


async def test_only_the_choices_that_were_broken_off_go_on(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    call = chat(n=2)
    engines.generations, engines.answers = [more(9)], [spelled("whole")]
    whole = await continuation.whole(call, reply(call, choice(7, end="length"), choice(8, index=1)), 5)
    assert [one.response_ids.tolist() for one in whole.choices] == [[7], [8, 9]]
    told = json.loads(whole.body())["choices"]
    assert [(one["message"]["content"], one["finish_reason"]) for one in told] == [
        ("half", "length"),
        ("whole", "stop"),
    ]
    assert whole.usage == Usage(2, 3)


async def test_who_asked_for_ids_and_logprobs_gets_those_of_the_whole(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    call = chat(logprobs=True, return_token_ids=True)
    engines.generations, engines.answers = [more(8)], [spelled("whole")]
    told = json.loads((await continuation.whole(call, reply(call, choice(7)), 5)).body())["choices"][0]
    assert told["token_ids"] == [7, 8]
    assert [entry["logprob"] for entry in told["logprobs"]["content"]] == [-0.5, -1.0]


async def test_a_stream_gets_the_rest_of_its_text_and_its_end(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    call = chat(stream=True, stream_options={"include_usage": True})
    engines.generations, engines.answers = [more(9, 10)], [spelled("half and half")]
    events, choices = await continuation.stream(call, stream(call, {"content": "ha"}, {"content": "lf"}), 5)
    rest, counted, nothing = events.split(b"\n\n")
    assert nothing == b""
    (completed,) = json.loads(rest.removeprefix(b"data: "))["choices"]
    assert (completed["delta"], completed["finish_reason"]) == ({"content": " and half"}, "stop")
    assert json.loads(counted.removeprefix(b"data: "))["usage"]["completion_tokens"] == 4
    assert [one.response_ids.tolist() for one in choices] == [[7, 8, 9, 10]]
    assert choices[0].version_spans == (VersionSpan(5, 0, 2), VersionSpan(6, 2, 4))


async def test_a_count_that_was_not_asked_for_is_not_told(engines: ScriptedEngines, continuation: Continuation) -> None:
    call = chat(stream=True)
    engines.generations, engines.answers = [more(9)], [spelled("half and half")]
    events, _ = await continuation.stream(call, stream(call, {"content": "half"}), 5)
    assert b"usage" not in events


async def test_nothing_is_asked_to_be_spelled_where_only_the_end_was_written(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    engines.generations = [more(9)]
    whole = await continuation.whole(chat(), reply(chat(), choice()), 5)
    assert json.loads(whole.body())["choices"][0]["message"]["content"] == ""
    assert engines.sent == []


@pytest.mark.parametrize(
    "call",
    [
        chat(response_format={"type": "json_object"}),
        chat(temperature=0, tool_choice="required", tools=[{"type": "function"}]),
        completion(),
    ],
)
async def test_what_cannot_go_on_is_the_engines_failure(
    engines: ScriptedEngines, continuation: Continuation, call: ModelCall
) -> None:
    with pytest.raises(EngineUnavailable, match="cannot be carried on"):
        await continuation.whole(call, reply(call, choice(7)), 5)
    assert engines.generated == []


async def test_an_engine_that_does_not_come_to_an_end_is_given_up(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    engines.generations = [more(end="abort") for _ in range(MOST_ABORTS)]
    with pytest.raises(EngineUnavailable, match=f"{MOST_ABORTS} times"):
        await continuation.whole(chat(), reply(chat(), choice(7)), 5)


@pytest.mark.parametrize(
    ("generation", "answer", "why"),
    [
        (RefusedReply(400, b"no room"), None, "refuses to carry its answer on: no room"),
        (more(8, logprobs=False), None, "without log-probabilities"),
        (more(8, 9), ScriptedBody(b"{}", status=404), "cannot tell what its tokens spell"),
        (more(8, 9), ScriptedBody(b"{}"), "no choices"),
    ],
)
async def test_an_engine_that_cannot_help_is_named_in_the_failure(
    engines: ScriptedEngines,
    continuation: Continuation,
    generation: Generated | RefusedReply,
    answer: ScriptedBody | None,
    why: str,
) -> None:
    engines.generations = [generation]
    engines.answers = [] if answer is None else [answer]
    with pytest.raises(EngineUnavailable, match=why):
        await continuation.whole(chat(), reply(chat(), choice(7)), 5)
    assert engines.engine.in_flight == 0


async def test_thinking_is_told_by_both_names(engines: ScriptedEngines, continuation: Continuation) -> None:
    engines.generations, engines.answers = [more(8, 9)], [spelled("a", reasoning_content="hm")]
    told = json.loads((await continuation.whole(chat(), reply(chat(), choice(7)), 5)).body())["choices"][0]
    assert (told["message"]["reasoning"], told["message"]["reasoning_content"]) == ("hm", "hm")
