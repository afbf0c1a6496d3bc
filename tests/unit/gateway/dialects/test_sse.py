import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.wire.openai import NO_USAGE, Usage
from tests.unit.gateway.dialects.asking import ODD_JSON, PassedStream, chat, completion, objects_with

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def piece(delta: Any = None, *ids: int, index: int = 0, **fields: Any) -> dict[str, Any]:
    """A chunk with one piece of a choice; every token has the log-probability -0.5."""
    logprobs = {"content": [{"token": "t", "logprob": -0.5} for _ in ids]} if ids else None
    choice = {"index": index, "delta": delta or {}, "logprobs": logprobs, "finish_reason": None}
    return {"id": "x", "model": "m", "choices": [{**choice, **({"token_ids": [*ids]} if ids else {}), **fields}]}


OPENING = {**piece({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2, 3], "prompt_text": None}
ENDING = piece({"content": "!"}, 9, finish_reason="stop")
USAGE = {"id": "x", "model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
STREAM = [OPENING, piece({"content": "hel"}, 7), piece({"content": "lo"}, 8), ENDING, USAGE]


def read(chunks: Sequence[Any], call: ModelCall | None = None) -> tuple[PassedStream, list[dict[str, Any]]]:
    """The reader after those chunks, and the chunks that the agent got."""
    reader = PassedStream(call or chat(stream=True))
    out = b"".join([*(reader.feed(event(chunk)) for chunk in chunks), reader.feed(DONE), reader.end()])
    *events, rest = out.split(b"\n\n")
    assert rest == b""
    return reader, [json.loads(one.removeprefix(b"data: ")) for one in events]


def deltas(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def recorded(reader: PassedStream) -> list[tuple[Any, ...]]:
    """What was sampled, comparable."""
    return [
        (one.prompt_ids.tolist(), one.response_ids.tolist(), repr(one.logprobs), one.finish_reason)
        for one in reader.answer.sampled()
    ]


def test_text_passes_and_ids_stay() -> None:
    reader, got = read(STREAM)
    assert "".join(delta["content"] for delta in deltas(got)) == "hello!"
    assert [choice["finish_reason"] for chunk in got for choice in chunk["choices"]] == [None, None, None, "stop"]
    assert all(chunk["id"] == "x" for chunk in got)
    assert "token_ids" not in json.dumps(got)
    assert "prompt_text" not in json.dumps(got)
    assert all(choice["logprobs"] is None for chunk in got for choice in chunk["choices"])
    (sampled,) = reader.answer.sampled()
    assert (sampled.prompt_ids.tolist(), sampled.response_ids.tolist()) == ([1, 2, 3], [7, 8, 9])
    assert sampled.logprobs is not None
    assert sampled.logprobs.tolist() == [-0.5] * 3
    assert (sampled.finish_reason, reader.answer.usage) == ("stop", Usage(3, 3))
    assert reader.answer.done
    assert reader.answer.is_whole
    assert not reader.answer.is_aborted


def test_an_agent_that_asked_for_everything_gets_everything() -> None:
    call = chat(stream=True, logprobs=True, return_token_ids=True, stream_options={"include_usage": True})
    assert read(STREAM, call)[1] == STREAM


def test_the_count_is_shown_to_who_asked_for_it() -> None:
    counting = {**piece({"content": "a"}, 7), "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    _, hidden = read([OPENING, counting, ENDING, USAGE])
    assert "usage" not in json.dumps(hidden)
    reader, shown = read([OPENING, counting, ENDING, USAGE], chat(stream=True, stream_options={"include_usage": True}))
    assert [chunk.get("usage") for chunk in shown] == [None, counting["usage"], None, USAGE["usage"]]
    assert reader.answer.usage == Usage(3, 3)


def test_the_model_that_the_engine_names_is_known() -> None:
    reader, _ = read(STREAM)
    assert [one.model for one in reader.answer.sampled()] == ["m"]
    nameless, _ = read([{"choices": chunk["choices"]} for chunk in STREAM])
    assert [one.model for one in nameless.answer.sampled()] == [""]


def test_a_stream_without_a_count_has_none() -> None:
    reader, _ = read([OPENING, ENDING, {**piece(), "usage": None}])
    assert reader.answer.usage == NO_USAGE


def test_an_event_passes_as_soon_as_its_last_byte_is_there() -> None:
    reader, whole = PassedStream(chat(stream=True)), event(STREAM[1])
    for byte in range(len(whole) - 1):
        assert reader.feed(whole[byte : byte + 1]) == b""
    assert json.loads(reader.feed(whole[-1:])[6:])["choices"][0]["delta"] == {"content": "hel"}


def test_several_choices_are_kept_apart_and_in_order() -> None:
    mixed = [piece({"content": "b"}, 8, index=1), piece({"content": "a"}, 7), piece({"content": "B"}, 18, index=1)]
    ends = [piece({}, index=index, finish_reason=end) for index, end in ((1, "length"), (0, "stop"))]
    reader, got = read([OPENING, *mixed, *ends], chat(stream=True, n=2))
    assert [(one.response_ids.tolist(), one.finish_reason) for one in reader.answer.sampled()] == [
        ([7], "stop"),
        ([8, 18], "length"),
    ]
    assert reader.answer.texts() == ["a", "bB"]
    assert [chunk["choices"][0]["index"] for chunk in got] == [0, 1, 0, 1, 1, 0]


def test_a_choice_that_has_not_ended_makes_the_stream_less_than_whole() -> None:
    reader, _ = read([OPENING, ENDING, piece({"content": "b"}, 8, index=1)])
    assert not reader.answer.is_whole
    assert not PassedStream(chat(stream=True)).answer.is_whole


def test_tool_calls_pass_and_are_remembered_by_their_index() -> None:
    calls = [
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": "{}"}}, {"id": "no index"}, "odd"]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    reader, got = read([piece(call, 7) for call in calls] + [ENDING])
    assert deltas(got)[:4] == calls
    assert {index: "".join(parts) for index, parts in reader.answer.choices[0].arguments.items()} == {
        0: '{"a": 1}',
        1: "{}",
    }
    assert reader.answer.texts() == [None]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_passes_by_both_names_or_not_at_all(name: str) -> None:
    thinking = [piece({name: "h"}, 5), piece({name: "m"}, 6), ENDING]
    reader, got = read(thinking)
    assert deltas(got)[:2] == [{"reasoning": text, "reasoning_content": text} for text in "hm"]
    assert (reader.answer.choices[0].reasoning, reader.answer.texts()) == (["h", "m"], [None])
    hidden, got = read(thinking, chat(stream=True, include_reasoning=False))
    assert deltas(got) == [{}, {}, {"content": "!"}]
    assert recorded(hidden) == recorded(reader)


def test_completions_stream_texts_with_each_choice_its_own_prompt() -> None:
    def text(index: int, prompt: list[int], end: str | None) -> dict[str, Any]:
        flat = {"tokens": ["a"], "token_logprobs": [-0.25]}
        choice = {"index": index, "text": "a", "logprobs": flat, "finish_reason": end, "token_ids": [7]}
        return {"choices": [{**choice, "prompt_token_ids": prompt}]}

    chunks = [text(0, [1], None), text(1, [2, 3], "stop"), text(0, [], "stop")]
    reader, got = read(chunks, completion(stream=True, prompt=["a", "b"]))
    assert [(one.prompt_ids.tolist(), one.response_ids.tolist()) for one in reader.answer.sampled()] == [
        ([1], [7, 7]),
        ([2, 3], [7]),
    ]
    assert reader.answer.texts() == ["aa", "a"]
    assert got[0] == {"choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]}


def test_the_end_of_an_aborted_choice_is_held_back_with_what_it_says() -> None:
    aborted = piece({"content": "lost"}, 10, finish_reason="abort")
    call = chat(stream=True, stream_options={"include_usage": True})
    reader, got = read([*STREAM[:3], aborted, USAGE], call)
    assert reader.answer.is_aborted
    assert reader.answer.is_whole
    assert "".join(delta["content"] for delta in deltas(got)) == "hello"
    assert "usage" not in json.dumps(got)
    choice = reader.answer.choices[0]
    assert (choice.ids, choice.shown_tokens, "".join(choice.content)) == ([7, 8, 10], 2, "hello")
    assert reader.answer.head == {"id": "x", "model": "m"}


def test_of_a_chunk_with_an_aborted_choice_the_others_pass() -> None:
    both = piece({"content": "a"}, 7)
    both["choices"] += piece({}, index=1, finish_reason="abort")["choices"]
    _, got = read([both], chat(stream=True, n=2))
    assert [choice["index"] for chunk in got for choice in chunk["choices"]] == [0]


def test_an_error_is_kept_and_not_passed_on_in_mid_stream() -> None:
    failure = {"error": {"message": "out of memory", "code": 500}}
    reader, got = read([*STREAM[:2], failure])
    assert reader.answer.error is not None
    assert reader.answer.error == failure
    assert len(got) == 2
    assert reader.answer.is_whole, "the engine has said why there is no more"
    assert read([{**chunk, "error": None} for chunk in STREAM])[0].answer.error is None


@pytest.mark.parametrize("value", [math.nan, None])
def test_a_logprob_of_null_or_nan_stays_visible_as_nan(value: float | None) -> None:
    odd = piece({"content": "a"}, 7, logprobs={"content": [{"logprob": value}]})
    reader, _ = read([OPENING, odd, ENDING])
    (sampled,) = reader.answer.sampled()
    assert sampled.logprobs is not None
    assert [math.isnan(logprob) for logprob in sampled.logprobs] == [True, False]


@pytest.mark.parametrize("content", [["x"], [{"token": "t"}], [None]])
def test_a_logprob_that_is_missing_counts_as_null(content: Any) -> None:
    reader, _ = read([piece({"content": "a"}, 7, logprobs={"content": content}), ENDING])
    (sampled,) = reader.answer.sampled()
    assert sampled.logprobs is not None
    assert math.isnan(sampled.logprobs[0])


def test_ids_that_are_no_numbers_are_no_ids() -> None:
    reader, _ = read([piece({"content": "a"}, token_ids=["7"]), ENDING])
    assert reader.answer.sampled()[0].response_ids.tolist() == []


@pytest.mark.parametrize(
    "written",
    [
        b"data:{json}\n\n",
        b"data: {json} \n\n",
        b"data: {json}\r\n\r\n",
        b": a comment\n\ndata: {json}\n\n",
        b": a comment\ndata: {json}\n\n",
        b"event: chunk\nid: 3\ndata: {json}\nretry: 5\n\n",
        b"\n\n\ndata: {json}\n\n\n\n",
        b"data:\n\ndata: {json}\n\n",
        b'data: {"choices":\ndata: [{"delta": {"content": "hi"}, "index": 0}]}\n\n',
    ],
)
def test_events_are_read_however_they_are_written(written: bytes) -> None:
    payload = json.dumps(piece({"content": "hi"})).encode()
    reader = PassedStream(chat(stream=True))
    out = reader.feed(written.replace(b"{json}", payload))
    assert json.loads(out.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "hi"}
    assert reader.answer.texts() == ["hi"]


@pytest.mark.parametrize("last", [b"data: [DONE]", b"data:[DONE]\n", b"data: [DONE] \r\n", b"data: [DONE]\n\n"])
def test_the_last_event_counts_even_without_its_blank_line(last: bytes) -> None:
    reader = PassedStream(chat(stream=True))
    assert reader.feed(event(ENDING) + last) != b""
    assert reader.end() == b""
    assert reader.answer.done
    cut = PassedStream(chat(stream=True))
    assert cut.feed(event(ENDING).strip()) == b""
    assert json.loads(cut.end()[6:])["choices"][0]["finish_reason"] == "stop"


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    reader = PassedStream(chat(stream=True))
    out = reader.feed(event(piece({"content": "a"}, 7)).replace(b'"a"', b'"a\xff\xc3"'))
    assert json.loads(out[6:])["choices"][0]["delta"]["content"].startswith("a�")
    assert reader.answer.sampled()[0].response_ids.tolist() == [7]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"data: {\n\n", "not JSON"),
        (b"data: 5\n\n", "not a JSON object"),
        (b"data: {}\n\n", "without choices"),
        (b'data: {"choices": ["x"]}\n\n', "not an object"),
        (b'data: {"choices": [{"index": []}]}\n\n', "index is not a number"),
        (b'data: {"choices": [{"index": "0"}]}\n\n', "index is not a number"),
    ],
)
def test_a_malformed_chunk_is_the_engines_failure(written: bytes, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        PassedStream(chat(stream=True)).feed(written)


def test_an_event_cut_off_at_the_end_is_the_engines_failure() -> None:
    reader = PassedStream(chat(stream=True))
    assert reader.feed(event(STREAM[1])[:20]) == b""
    with pytest.raises(EngineUnavailable, match="not JSON"):
        reader.end()


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    for filler in (b"x" * 100, b"x" * 99 + b"\n"):
        reader = PassedStream(chat(stream=True), longest=1000)
        with pytest.raises(EngineUnavailable, match="too long"):
            for _ in range(11):
                reader.feed(filler)
    long_but_fine = PassedStream(chat(stream=True), longest=1000)
    for _ in range(100):
        long_but_fine.feed(event(STREAM[1]))


TEXT = st.text(max_size=6)
DELTA = st.one_of(
    st.fixed_dictionaries({"content": TEXT}),
    st.fixed_dictionaries({"reasoning": TEXT}),
    st.fixed_dictionaries({"reasoning_content": TEXT}),
    st.builds(
        lambda index, text: {"tool_calls": [{"index": index, "function": {"arguments": text}}]}, st.just(0), TEXT
    ),
    st.just({}),
)
ENDS = st.sampled_from([None, None, None, "stop", "length", "abort"])
CHUNK = st.builds(
    lambda delta, ids, index, end: piece(delta, *ids, index=index, finish_reason=end),
    DELTA,
    st.lists(st.integers(0, 2**31 - 1), max_size=3),
    st.integers(0, 1),
    ENDS,
)
WRITTEN = st.tuples(
    CHUNK, st.booleans(), st.sampled_from([b"", b": ping\n\n", b": ping\n", b"\n\n", b"event: x\n"])
).map(lambda made: made[2] + b"data: " + json.dumps(made[0], ensure_ascii=made[1]).encode() + b"\n\n")
CALLS = st.sampled_from(
    [
        chat(stream=True),
        chat(stream=True, logprobs=True, return_token_ids=True, n=2),
        chat(stream=True, include_reasoning=False, stream_options={"include_usage": True}),
    ]
)


@given(st.lists(WRITTEN, max_size=6), st.booleans(), CALLS, st.data())
def test_where_a_stream_is_cut_changes_nothing(
    events: list[bytes], crlf: bool, call: ModelCall, data: st.DataObject
) -> None:
    whole = b"".join([event(OPENING), *events, event(USAGE), DONE])
    whole = whole.replace(b"\n", b"\r\n") if crlf else whole
    at_once, in_pieces = PassedStream(call), PassedStream(call)
    expected = at_once.feed(whole) + at_once.end()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    got = b""
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        if start < end:
            got += in_pieces.feed(whole[start:end])
    assert got + in_pieces.end() == expected
    assert recorded(in_pieces) == recorded(at_once)
    assert (
        (in_pieces.answer.usage, in_pieces.answer.done)
        == (at_once.answer.usage, at_once.answer.done)
        == (Usage(3, 3), True)
    )
    assert in_pieces.answer.texts() == at_once.answer.texts()


PIECES = st.lists(
    objects_with(
        "index", "delta", "text", "finish_reason", "token_ids", "logprobs", "prompt_token_ids", values=ODD_JSON
    )
    | st.builds(piece, objects_with("content", "reasoning", "tool_calls", values=ODD_JSON)),
    max_size=3,
)
ODD_CHUNKS = st.builds(
    lambda rest, choices: {**rest, "choices": choices},
    objects_with("usage", "prompt_token_ids", "error", "id", values=ODD_JSON),
    PIECES,
)


@given(st.lists(ODD_CHUNKS | ODD_JSON, max_size=4), CALLS)
def test_whatever_an_engine_streams_is_read_or_is_its_failure(chunks: list[Any], call: ModelCall) -> None:
    reader = PassedStream(call)
    for chunk in chunks:
        try:
            out = reader.feed(event(chunk))
        except EngineUnavailable:
            continue
        assert out == b"" or json.loads(out[6:])
    for sampled in reader.answer.sampled():
        assert sampled.response_ids.ndim == sampled.prompt_ids.ndim == 1
        assert sampled.logprobs is None or sampled.logprobs.ndim == 1
    assert len(reader.answer.texts()) == len(reader.answer.choices)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_whatever_bytes_come_are_read_or_are_the_engines_failure(pieces: list[bytes]) -> None:
    reader = PassedStream(chat(stream=True))
    try:
        for data in pieces:
            reader.feed(data)
        reader.end()
    except EngineUnavailable:
        pass
