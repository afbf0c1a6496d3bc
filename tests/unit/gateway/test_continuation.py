import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.engines.engine import Generated
from stepwell.engines.replica import RefusedReply
from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply, ChoicesStream, read_reply
from stepwell.gateway.engine_answers import (
    MOST_ABORTS,
    Continuation,
    finish_reason,
    logprob_entries,
    rest_chunk,
    rest_of_sampling,
)
from stepwell.steps.step import VersionSpan, ids_array, logprobs_array
from stepwell.wire.openai import NO_USAGE, Sampled, Usage
from tests.unit.gateway.dialects.asking import ODD_JSON, VLLM, PassedStream, chat, completion, objects_with, shown
from tests.unit.gateway.scripted_engines import ScriptedBody, ScriptedEngines


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


def written(call: ModelCall, chunk: dict[str, Any]) -> bytes:
    """The chunk as the agent gets it."""
    event = call.dialect.stream(call).chunk(chunk)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return event[6:-2]


def choice(*ids: int, end: str = "abort", index: int = 0) -> dict[str, Any]:
    logprobs = {"content": [{"logprob": -0.5} for _ in ids]}
    message = {"role": "assistant", "content": "half"}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": end, "token_ids": [*ids]}


def reply(call: ModelCall, *choices: dict[str, Any]) -> ChoicesReply:
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    return read_reply(
        json.dumps({"model": "m", "prompt_token_ids": [1, 2], "choices": choices, "usage": usage}).encode(),
        VLLM,
        keep_ids=call.wants.ids,
    )


def stream(call: ModelCall, *deltas: dict[str, Any], end: str = "abort") -> ChoicesStream:
    """A stream of which each delta is a token, broken off after them."""
    reader = PassedStream(call)
    chunks: list[dict[str, Any]] = [{"id": "x", "prompt_token_ids": [1, 2], "choices": []}]
    for token, delta in enumerate(deltas, start=7):
        logprobs = {"content": [{"logprob": -0.5}]}
        chunks.append({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "token_ids": [token]}]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    for chunk in chunks:
        reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return reader.answer


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
    told = json.loads(shown(chat(), whole))
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
    told = json.loads(shown(call, whole))["choices"]
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
    told = json.loads(shown(call, await continuation.whole(call, reply(call, choice(7)), 5)))["choices"][0]
    assert told["token_ids"] == [7, 8]
    assert [entry["logprob"] for entry in told["logprobs"]["content"]] == [-0.5, -1.0]


async def test_a_stream_gets_the_rest_of_its_text_and_its_end(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    call = chat(stream=True, stream_options={"include_usage": True})
    engines.generations, engines.answers = [more(9, 10)], [spelled("half and half")]
    chunks, choices = await continuation.stream(call, stream(call, {"content": "ha"}, {"content": "lf"}), 5)
    rest, counted = (json.loads(written(call, chunk)) for chunk in chunks)
    (completed,) = rest["choices"]
    assert (completed["delta"], completed["finish_reason"]) == ({"content": " and half"}, "stop")
    assert counted["usage"]["completion_tokens"] == 4
    assert [one.response_ids.tolist() for one in choices] == [[7, 8, 9, 10]]
    assert choices[0].version_spans == (VersionSpan(5, 0, 2), VersionSpan(6, 2, 4))


async def test_a_count_that_was_not_asked_for_is_not_told(engines: ScriptedEngines, continuation: Continuation) -> None:
    call = chat(stream=True)
    engines.generations, engines.answers = [more(9)], [spelled("half and half")]
    (rest, counted), _ = await continuation.stream(call, stream(call, {"content": "half"}), 5)
    assert b"usage" not in written(call, rest)
    assert call.dialect.stream(call).chunk(counted) == b""


async def test_nothing_is_asked_to_be_spelled_where_only_the_end_was_written(
    engines: ScriptedEngines, continuation: Continuation
) -> None:
    engines.generations = [more(9)]
    whole = await continuation.whole(chat(), reply(chat(), choice()), 5)
    assert json.loads(shown(chat(), whole))["choices"][0]["message"]["content"] == ""
    assert engines.sent == []


@pytest.mark.parametrize(
    "call",
    [
        chat(response_format={"type": "json_object"}),
        chat(response_format={"type": "json_object"}, temperature=0),
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
    told = json.loads(shown(chat(), await continuation.whole(chat(), reply(chat(), choice(7)), 5)))["choices"][0]
    assert (told["message"]["reasoning"], told["message"]["reasoning_content"]) == ("hm", "hm")


HEAD = {"id": "x", "model": "m"}
SAMPLED = Sampled(ids_array([1, 2]), ids_array([7, 8, 9]), logprobs_array([-0.5, -1.0, -1.5]), "stop")


def rest(call: ModelCall, sent: list[dict[str, Any]], message: dict[str, Any], shown_tokens: int = 0) -> dict[str, Any]:
    """The choice in the chunk that completes a stream of which those deltas were sent."""
    reader = PassedStream(call)
    for delta in sent:
        reader.feed(b"data: " + json.dumps({**HEAD, "choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n")
    reader.feed(
        json.dumps({**HEAD, "choices": [{"index": 0, "finish_reason": "abort"}]}).join(("data: ", "\n\n")).encode()
    )
    reader.answer.choices[0].shown_tokens = shown_tokens
    chunk = json.loads(written(call, rest_chunk(call, reader.answer, 0, message, SAMPLED)))
    assert {name: chunk[name] for name in HEAD} == HEAD
    (completed,) = chunk["choices"]
    return dict(completed)


def assembled(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that an agent makes of deltas."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            for name, text in call["function"].items():
                known[name] += text or ""
    texts = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")}
    return {**texts, "calls": [calls[index] for index in sorted(calls)]}


TEXT = st.text(max_size=12)
CALL = st.fixed_dictionaries({"name": st.just("f"), "arguments": TEXT})


def cut(text: str, name: str, data: st.DataObject) -> list[dict[str, Any]]:
    """The beginning of a text, in pieces."""
    end = data.draw(st.integers(0, len(text)))
    middle = data.draw(st.integers(0, end))
    return [{name: part} for part in (text[:middle], text[middle:end]) if part]


def cut_calls(calls: list[dict[str, str]], data: st.DataObject) -> list[dict[str, Any]]:
    """The beginning of some calls: whole ones, then perhaps a part of the next."""
    deltas: list[dict[str, Any]] = []
    for index, call in enumerate(calls[: data.draw(st.integers(0, len(calls)))]):
        deltas.append({"tool_calls": [{"index": index, "id": "c", "function": {"name": call["name"]}}]})
        parts = cut(call["arguments"], "arguments", data)
        deltas += [{"tool_calls": [{"index": index, "function": part}]} for part in parts]
    return deltas


@given(TEXT, TEXT, st.lists(CALL, max_size=3), st.data())
def test_what_was_sent_and_the_rest_are_the_whole_message(
    content: str, reasoning: str, calls: list[dict[str, str]], data: st.DataObject
) -> None:
    sent = cut(reasoning, "reasoning", data) + cut(content, "content", data) + cut_calls(calls, data)
    message = {
        "content": content,
        "reasoning": reasoning,
        "tool_calls": [{"id": "d", "type": "function", "function": call} for call in calls],
    }
    completed = rest(chat(stream=True), sent, message)
    assert assembled([*sent, completed["delta"]]) == {"content": content, "reasoning": reasoning, "calls": calls}


def test_a_call_of_which_nothing_was_sent_comes_whole() -> None:
    call = {"id": "d", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    completed = rest(chat(stream=True), [{"content": "so"}], {"content": "so", "tool_calls": [call]})
    assert completed["delta"] == {"tool_calls": [{**call, "index": 0}]}
    assert completed["finish_reason"] == "tool_calls"


def test_blanks_that_a_parser_trims_are_not_taken_for_a_difference() -> None:
    delta = rest(chat(stream=True), [{"content": "well \n"}], {"content": "well"})["delta"]
    assert delta == {}
    assert rest(chat(stream=True), [{"content": "well \n"}], {"content": "well, no"})["delta"] == {"content": ", no"}


def test_what_was_sent_and_is_not_in_the_whole_cannot_be_mended() -> None:
    with pytest.raises(EngineUnavailable, match="differs from the text that it streamed"):
        rest(chat(stream=True), [{"content": "yes"}], {"content": "no"})


def test_thinking_completes_by_both_names_or_not_at_all() -> None:
    message = {"content": "a", "reasoning": "hm"}
    assert rest(chat(stream=True), [{"reasoning": "h"}], message)["delta"] == {
        "content": "a",
        "reasoning": "m",
        "reasoning_content": "m",
    }
    assert rest(chat(stream=True, include_reasoning=False), [], message)["delta"] == {"content": "a"}


def test_ids_and_logprobs_go_on_where_they_stopped_for_who_asked_for_them() -> None:
    plain = rest(chat(stream=True), [], {"content": "a"}, shown_tokens=1)
    assert plain["logprobs"] is None
    assert "token_ids" not in plain
    asked = rest(chat(stream=True, logprobs=True, return_token_ids=True), [], {"content": "a"}, shown_tokens=1)
    assert asked["token_ids"] == [8, 9]
    assert [entry["logprob"] for entry in asked["logprobs"]["content"]] == [-1.0, -1.5]
    assert len(logprob_entries(SAMPLED, 0)) == 3


def test_the_rest_is_sampled_as_the_beginning_was_and_is_as_much_shorter() -> None:
    sampling = rest_of_sampling(chat(temperature=0.5, stop=["."], seed=None, n=2), 10)
    assert (sampling["temperature"], sampling["stop"], sampling["max_tokens"]) == (0.5, ["."], 54)
    assert not {"seed", "n", "messages"} & set(sampling)


def test_a_seed_is_not_used_twice() -> None:
    assert rest_of_sampling(chat(seed=3), 10)["seed"] != 3
    assert rest_of_sampling(chat(seed="3"), 10)["seed"] == "3", "the engine's to judge"


@pytest.mark.parametrize(
    ("tool_choice", "end", "told"),
    [("auto", "stop", "tool_calls"), ("auto", "length", "length"), ({"type": "function"}, "stop", "stop")],
)
def test_an_answer_that_ends_in_calls_says_so(tool_choice: Any, end: str, told: str) -> None:
    sampled = Sampled(SAMPLED.prompt_ids, SAMPLED.response_ids, None, end)
    assert finish_reason(chat(tool_choice=tool_choice), {"tool_calls": [{}]}, sampled) == told
    assert finish_reason(chat(tool_choice=tool_choice), {"tool_calls": []}, sampled) == end


@given(objects_with("content", "reasoning", "tool_calls", values=ODD_JSON) | ODD_JSON)
def test_whatever_is_derendered_completes_a_stream_or_is_the_engines_failure(message: Any) -> None:
    raw = json.dumps({"choices": [{"message": message}]}).encode()
    with suppress(EngineUnavailable):
        rest(chat(stream=True), [], VLLM.read_derendered(raw, SAMPLED))
