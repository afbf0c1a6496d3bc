import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from stepwell.gateway.dialects.messages_dialect import MessagesDialect
from stepwell.gateway.dialects.request_rules import SamplingPolicy
from stepwell.gateway.error_responses import describe, describe_refusal
from stepwell.steps.trainable import untrainable_reason

from stepwell.access.access_keys import AccessKeys
from stepwell.errors import (
    BadRequest,
    EngineUnavailable,
    Forbidden,
    ModelNotFound,
    NotReady,
    Overloaded,
    StepwellError,
    TooLarge,
)
from stepwell.gateway.dialects.chat_form import StepSeal
from stepwell.gateway.dialects.dialect import DialectContext, ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesStream, read_reply
from stepwell.wire.openai import NO_USAGE, Usage
from tests.unit.gateway.dialects.asking import JSON, VLLM, asked, objects_with
from tests.unit.gateway.dialects.scripted_chats import ScriptedAnswer, ScriptedCall

MESSAGES = MessagesDialect()
SEAL = StepSeal(AccessKeys(["control-key-of-the-tests"]))
AROUND = DialectContext(response_length=64, seal=SEAL, models=("tiny", "big"))
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def call(around: DialectContext = AROUND, **fields: Any) -> ModelCall:
    request = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], **fields}
    return MESSAGES.read(json.dumps(request).encode(), around)


def whole(answer: ScriptedAnswer, **fields: Any) -> dict[str, Any]:
    asking = call(**fields)
    return dict(json.loads(MESSAGES.reply(asking, read_reply(answer.whole(), VLLM, keep_ids=True))))


class Stream:
    """One streamed answer: what the client gets of each of the engine's deltas."""

    def __init__(self, **fields: Any) -> None:
        self.call = call(stream=True, **fields)
        self.writer = MESSAGES.stream(self.call)
        self.sealed = SEAL.seal(self.call.uid)

    def feed(self, finish_reason: str | None = None, stop_reason: Any = None, **delta: Any) -> list[dict[str, Any]]:
        piece = {"index": 0, "delta": delta, "finish_reason": finish_reason, "stop_reason": stop_reason}
        return events(self.writer.chunk({"model": "m", "choices": [piece]}))

    def call_delta(self, index: int, arguments: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
        function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
        return self.feed(tool_calls=[{"index": index, "id": f"call-{index}" if name else None, "function": function}])

    def finish(self, usage: Usage = NO_USAGE) -> list[dict[str, Any]]:
        return events(self.writer.finish(usage))


def events(written: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.split("\ndata: ")[1]) for event in written.decode().split("\n\n")[:-1]]


def kinds(written: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in written]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_the_engine_is_asked_as_by_chat() -> None:
    body = asked(call(stream=True, tools=[TOOL], stop_sequences=["x"], top_k=3, system="be kind"))
    assert body["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert (body["logprobs"], body["return_token_ids"], body["stream_options"]) == (True, True, {"include_usage": True})
    assert (body["temperature"], body["top_k"], body["max_tokens"], body["stop"]) == (1.0, 3, 8, ["x"])


def test_sampling_and_models_follow_the_channels_policy() -> None:
    on_policy = DialectContext(response_length=4, sampling=SamplingPolicy(on_policy=True), models=("tiny",))
    sampled = call(on_policy, temperature=0.2, top_k=5, model="default")
    assert (sampled.request["temperature"], sampled.request["top_k"], sampled.request["max_tokens"]) == (1.0, 0, 4)
    assert (sampled.sampling["replaced"], sampled.request["model"]) == ({"temperature": 0.2, "top_k": 5}, "tiny")
    with pytest.raises(ModelNotFound, match="claude-x"):
        call(model="claude-x")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": [{"role": "user", "content": [PNG]}]}, "multimodal"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "constrained"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "constrained"),
        ({"temperature": 0}, "greedy"),
        ({"tools": [TOOL]}, None),
    ],
)
def test_a_step_is_marked_as_by_chat(fields: dict[str, Any], kind: str | None) -> None:
    reason = untrainable_reason(call(**fields).request)
    assert (reason and reason.partition(":")[0]) == kind


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": "8"}, {"temperature": "hot"}, {"stream": 1}])
def test_a_malformed_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(fields))):
        call(**fields)


# -- whole answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["", "{}", '{"b": 1.0, "a": 12345678901234567890123}'])
def test_a_tools_input_is_the_engines_text(arguments: str) -> None:
    body = MESSAGES.reply(
        call(), read_reply(ScriptedAnswer(calls=[ScriptedCall("1", "f", arguments)]).whole(), VLLM, keep_ids=True)
    )
    assert b'"input":' + (arguments or "{}").encode() in body


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "5", '{"a": NaN}', "hello"])
def test_arguments_that_are_no_object_are_shown_as_malformed(arguments: str) -> None:
    message = whole(ScriptedAnswer(calls=[ScriptedCall("1", "f", arguments)]))
    assert message["content"][0]["input"] == {"malformed": arguments}


def test_thoughts_are_hidden_if_thinking_is_disabled() -> None:
    answer = ScriptedAnswer("text", reasoning="thought")
    assert [block["type"] for block in whole(answer)["content"]] == ["thinking", "text"]
    assert [block["type"] for block in whole(answer, thinking={"type": "disabled"})["content"]] == ["text"]
    stream = Stream(thinking={"type": "disabled"})
    assert kinds(stream.feed(reasoning="thought")) == ["message_start"]
    assert kinds(stream.feed(content="text")) == ["content_block_start", "content_block_delta"]


def test_an_engines_answer_without_a_message_is_a_failure() -> None:
    broken = json.dumps({"choices": [{"text": "x"}]}).encode()
    with pytest.raises(EngineUnavailable, match="no message"):
        MESSAGES.reply(call(), read_reply(broken, VLLM, keep_ids=True))


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_has_its_blocks_in_order_and_signs_its_thoughts() -> None:
    stream = Stream()
    (start,) = stream.feed(role="assistant", content="")
    assert start["message"]["id"] == f"msg_{stream.sealed}"
    assert kinds(stream.feed(reasoning_content="hm")) == ["content_block_start", "content_block_delta"]
    signature, stop, text, delta = stream.feed(content="well")
    assert (signature["delta"], signature["index"]) == ({"type": "signature_delta", "signature": stream.sealed}, 0)
    assert (stop["type"], text["content_block"]["type"], text["index"]) == ("content_block_stop", "text", 1)
    assert delta["delta"] == {"type": "text_delta", "text": "well"}
    _, tool = stream.call_delta(0, name="add")
    assert tool["content_block"] == {"type": "tool_use", "id": f"call-0-{stream.sealed}", "name": "add", "input": {}}
    assert stream.call_delta(0, '{"a"')[0]["delta"] == {"type": "input_json_delta", "partial_json": '{"a"'}
    assert stream.feed("tool_calls") == []
    stop, end, last = stream.finish(Usage(5, 6))
    assert (stop["index"], last["type"]) == (2, "message_stop")
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (end["usage"]["input_tokens"], end["usage"]["output_tokens"]) == (5, 6)


def test_the_start_tells_the_prompts_length_where_the_engine_does() -> None:
    stream = Stream()
    (start,) = events(stream.writer.chunk({"choices": [{"index": 0, "delta": {}}], "prompt_token_ids": [1, 2, 3]}))
    assert start["message"]["usage"]["input_tokens"] == 3


def test_a_silent_stream_begins_with_a_ping_and_begins_once() -> None:
    stream = Stream()
    assert kinds(events(stream.writer.keep_alive())) == ["message_start", "ping"]
    assert kinds(events(stream.writer.keep_alive())) == ["ping"]
    assert stream.feed(content="") == []


def test_an_empty_answer_is_a_message_without_blocks() -> None:
    assert whole(ScriptedAnswer())["content"] == []
    assert kinds(Stream().finish()) == ["message_start", "message_delta", "message_stop"]


def test_text_after_a_tool_call_is_a_block_of_its_own() -> None:
    """The rest of an answer that the engine broke off comes as one delta: what continues the open block comes first."""
    stream = Stream()
    stream.call_delta(0, name="add")
    rest = stream.feed(content="done", tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])
    assert kinds(rest) == ["content_block_delta", "content_block_stop", "content_block_start", "content_block_delta"]
    assert rest[2]["index"] == 1


@pytest.mark.parametrize("again", [{"index": 0, "function": {"arguments": "1"}}, {"index": "x"}, {"index": 5}])
def test_a_tool_call_that_comes_back_or_has_no_name_is_a_failure(again: dict[str, Any]) -> None:
    stream = Stream()
    stream.call_delta(0, name="add")
    stream.feed(content="well")
    with pytest.raises(EngineUnavailable, match="tool call"):
        stream.feed(tool_calls=[again])


def test_usage_that_came_as_a_chunk_counts_where_the_end_has_none() -> None:
    stream = Stream()
    stream.feed("stop", "STOP", content="x")
    assert stream.writer.chunk({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}) == b""
    end = stream.finish()[1]
    assert (end["usage"]["input_tokens"], end["usage"]["output_tokens"]) == (3, 4)
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (Forbidden("x"), "authentication_error"),
        (ModelNotFound("x"), "not_found_error"),
        (TooLarge("x"), "request_too_large"),
        (Overloaded("x"), "rate_limit_error"),
        (EngineUnavailable("x"), "api_error"),
        (NotReady("x"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(failure: StepwellError, kind: str) -> None:
    body = json.loads(MESSAGES.error(describe(failure)))
    assert body == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": None}


def test_a_prompt_beyond_the_context_is_told_so_that_claude_code_compacts() -> None:
    refused = {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}}
    body = json.loads(MESSAGES.error(describe_refusal(400, json.dumps(refused).encode())))
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: This model's maximum")


def test_a_stream_that_fails_ends_in_an_error_event() -> None:
    written = Stream().writer.fail(MESSAGES.error(describe(EngineUnavailable("it broke"))))
    assert written.startswith(b"event: error\ndata: ")
    assert events(written)[0]["error"] == {"type": "api_error", "message": "it broke"}


# -- counting ----------------------------------------------------------------------------------------------------------


def test_a_count_asks_for_what_the_prompt_is_made_of() -> None:
    raw = json.dumps(
        {"model": "default", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "system": "s"}
    )
    counter = MESSAGES.token_counter
    assert counter is not None
    request = counter.read(raw.encode(), AROUND)
    assert (sorted(request), request["model"]) == (["messages", "model", "tools"], "tiny")
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert json.loads(counter.reply(12)) == {"input_tokens": 12}


# -- odd engines -------------------------------------------------------------------------------------------------------

FUNCTION = st.fixed_dictionaries({}, optional={"name": st.just("f") | JSON, "arguments": st.just('{"a":1}') | JSON})
CALL = st.fixed_dictionaries({}, optional={"index": st.integers(0, 2) | JSON, "id": JSON, "function": FUNCTION | JSON})
PART = st.fixed_dictionaries(
    {},
    optional={
        "content": st.text(max_size=3) | JSON,
        "reasoning": st.text(max_size=3) | JSON,
        "tool_calls": st.lists(CALL | JSON, max_size=2) | JSON,
    },
)
ENDING = objects_with("finish_reason", "stop_reason")


@given(PART | JSON, ENDING, objects_with("usage", "prompt_token_ids", "model"))
def test_whatever_an_engine_answers_is_a_message_or_its_fault(
    message: Any, ending: dict[str, Any], rest: dict[str, Any]
) -> None:
    raw = json.dumps({**rest, "choices": [{"index": 0, "message": message, **ending}]}).encode()
    try:
        written = MESSAGES.reply(call(), read_reply(raw, VLLM, keep_ids=True))
    except EngineUnavailable:
        return
    Message.model_validate_json(written)


@given(st.lists(st.tuples(PART | JSON, ENDING, objects_with("usage", "prompt_token_ids")), max_size=4))
def test_whatever_an_engine_streams_is_events_or_its_fault(
    pieces: list[tuple[Any, dict[str, Any], dict[str, Any]]],
) -> None:
    asking = call(stream=True)
    answer, writer = ChoicesStream(VLLM, keep_ids=True), MESSAGES.stream(asking)
    written = b""
    try:
        for delta, ending, rest in pieces:
            payload = {**rest, "choices": [{"index": 0, "delta": delta, **ending}]}
            if (chunk := answer.read(json.dumps(payload).encode())) is not None:
                written += writer.chunk(chunk)
        written += writer.finish(answer.usage)
    except EngineUnavailable:
        return
    for event in events(written):
        EVENT.validate_python(event)
