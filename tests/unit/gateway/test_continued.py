import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import EngineUnavailable
from stepwell.gateway.continued import (
    can_continue,
    finish_reason,
    logprob_entries,
    rest_of_sampling,
    rest_of_stream,
    usage_event,
)
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.sse import StreamReader
from stepwell.steps.step import ids_array, logprobs_array
from stepwell.wire.openai import Sampled
from tests.unit.wire.asking import ODD_JSON, VLLM, chat, objects_with

HEAD = {"id": "x", "model": "m"}
SAMPLED = Sampled(ids_array([1, 2]), ids_array([7, 8, 9]), logprobs_array([-0.5, -1.0, -1.5]), "stop")


def rest(call: ModelCall, sent: list[dict[str, Any]], message: dict[str, Any], told: int = 0) -> dict[str, Any]:
    """The choice in the event that completes a stream of which those deltas were sent, with `told` tokens."""
    reader = StreamReader(call, VLLM)
    for delta in sent:
        reader.feed(b"data: " + json.dumps({**HEAD, "choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n")
    reader.feed(b'data: {"choices": [{"index": 0, "finish_reason": "abort"}]}\n\n')
    choice = reader.choices[0]
    choice.told = told
    written = rest_of_stream(call, HEAD, 0, choice, message, SAMPLED)
    assert written.startswith(b"data: ")
    assert written.endswith(b"\n\n")
    chunk = json.loads(written[6:])
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
    with pytest.raises(EngineUnavailable, match="otherwise than it streamed it"):
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
    plain = rest(chat(stream=True), [], {"content": "a"}, told=1)
    assert plain["logprobs"] is None
    assert "token_ids" not in plain
    asked = rest(chat(stream=True, logprobs=True, return_token_ids=True), [], {"content": "a"}, told=1)
    assert asked["token_ids"] == [8, 9]
    assert [entry["logprob"] for entry in asked["logprobs"]["content"]] == [-1.0, -1.5]
    assert len(logprob_entries(SAMPLED, 0)) == 3


def test_an_answer_under_a_constraint_cannot_be_carried_on() -> None:
    constraint: Any = {"response_format": {"type": "json_object"}}
    assert can_continue(chat())
    assert can_continue(chat(temperature=0))
    assert can_continue(chat("side"))
    for call in (chat(**constraint), chat("side", **constraint), chat(temperature=0, **constraint)):
        assert not can_continue(call)


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


def test_the_count_comes_as_openais_last_chunk() -> None:
    chunk = json.loads(usage_event(HEAD, 3, 5)[6:])
    assert chunk == {**HEAD, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}


@given(objects_with("content", "reasoning", "tool_calls", values=ODD_JSON) | ODD_JSON)
def test_whatever_is_derendered_completes_a_stream_or_is_the_engines_failure(message: Any) -> None:
    raw = json.dumps({"choices": [{"message": message}]}).encode()
    with suppress(EngineUnavailable):
        rest(chat(stream=True), [], VLLM.read_derendered(raw, SAMPLED))
