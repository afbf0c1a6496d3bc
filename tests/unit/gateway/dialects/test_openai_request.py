import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.steps.trainable import untrainable_reason

from stepwell.engines import PRIVATE_FIELDS
from stepwell.engines.engine import EXTRA_SAMPLING
from stepwell.errors import BadRequest
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import Dialect
from tests.unit.gateway.dialects.asking import (
    AROUND,
    CHAT,
    COMPLETIONS,
    HELLO,
    JSON,
    asked,
    chat,
    completion,
    objects_with,
)


def test_the_engine_is_asked_for_ids_and_logprobs_and_other_listed_fields_pass() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = asked(chat(temperature=0.5, tools=tools, seed=7, some_future_field={"a": 1}))
    assert body["return_token_ids"] is body["logprobs"] is True
    assert (body["messages"], body["tools"], body["seed"]) == (HELLO, tools, 7)
    assert "some_future_field" not in body


@pytest.mark.parametrize("name", sorted(PRIVATE_FIELDS))
def test_fields_that_reach_past_the_request_are_taken_out(name: str) -> None:
    assert name not in asked(chat(**{name: "x"}))
    assert name not in asked(completion(**{name: "x"}))


def test_thinking_is_always_asked_for_because_without_it_the_engine_drops_the_ids() -> None:
    quiet, open_ = chat(include_reasoning=False), chat()
    assert asked(quiet)["include_reasoning"] is asked(open_)["include_reasoning"] is True
    assert (quiet.wants.reasoning, open_.wants.reasoning) == (False, True)


def test_a_plain_server_is_sent_none_of_vllms_fields() -> None:
    body = asked(chat(top_k=5, seed=3), plain=True)
    assert not {*EXTRA_SAMPLING, "return_token_ids", "include_reasoning"} & set(body)
    assert body["logprobs"] is True
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (1.0, 3, 64)


@pytest.mark.parametrize(
    ("fields", "in_force"),
    [
        ({}, 64),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 100}, 64),
        ({"max_completion_tokens": 5, "max_tokens": 10}, 5),
        ({"max_completion_tokens": 100}, 64),
        ({"max_tokens": None, "max_completion_tokens": None}, 64),
    ],
)
def test_no_answer_is_longer_than_a_trainer_takes(fields: dict[str, Any], in_force: int) -> None:
    body = asked(chat(**fields))
    assert body["max_tokens"] == in_force
    assert body.get("max_completion_tokens") is None, "the engine would heed it instead"
    assert chat(**fields).sampling["max_tokens"] == in_force


def test_an_engine_is_never_asked_for_more_tokens_than_its_window() -> None:
    assert asked(chat(), window=32)["max_tokens"] == 32
    assert asked(chat(), window=4096)["max_tokens"] == 64
    assert asked(chat(), plain=True, window=32)["max_tokens"] == 32


@pytest.mark.parametrize(("n", "choices"), [(None, 1), (1, 1), (4, 4), (128, 128)])
def test_n_choices_are_as_many_steps(n: int | None, choices: int) -> None:
    assert chat(n=n).choices_per_prompt == completion(n=n).choices_per_prompt == choices


@pytest.mark.parametrize(
    ("options", "told"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_a_stream_is_always_counted_and_the_count_shown_to_who_asked(options: Any, told: bool) -> None:
    call = chat(stream=True, stream_options=options)
    assert asked(call)["stream_options"] == {"include_usage": True}
    assert (call.stream, call.wants.usage) == (True, told)


def test_other_stream_options_pass_and_none_are_added_without_a_stream() -> None:
    body = asked(chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert body["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    assert "stream_options" not in asked(chat())


@pytest.mark.parametrize(
    ("logprobs", "wanted", "sent"), [(None, False, 0), (False, False, 0), (0, True, 0), (3, True, 3)]
)
def test_completions_ask_for_logprobs_with_a_number(logprobs: Any, wanted: bool, sent: int) -> None:
    call = completion(logprobs=logprobs)
    assert (call.wants.logprobs, asked(call)["logprobs"]) == (wanted, sent)


def test_completions_are_forwarded_with_their_prompt_as_it_is() -> None:
    for prompt in ("hello", [1, 2, 3], ["a", "b"], [[1], [2, 3]]):
        call = completion(prompt=prompt)
        assert asked(call)["prompt"] == prompt
        assert "include_reasoning" not in asked(call)
        assert (call.dialect, call.upstream) == (COMPLETIONS, "/v1/completions")


def test_malformed_history_is_mended_and_counted() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}]
    call = chat(messages=[*HELLO, {"role": "assistant", "tool_calls": calls}])
    assert call.malformed_history == 1
    (sent,) = asked(call)["messages"][1]["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"malformed": '{"a": '}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"{", "not JSON"),
        (b'{"messages": "\xff"}', "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "messages must be a list"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": ["x"]}', "every message must be an object"),
        (b'{"messages": [{"content": "x"}]}', "with a role"),
        (b'{"messages": [{"role": "assistant", "tool_calls": "f"}]}', "tool_calls must be a list"),
    ],
)
def test_a_body_that_is_no_chat_is_refused_with_the_reason(raw: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        CHAT.read(raw, AROUND)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_tokens": "many"}, "max_tokens must be a whole number"),
        ({"max_tokens": 0}, "at least 1, not 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens must be a whole number"),
        ({"temperature": "0"}, "temperature must be a number, not 0"),
        ({"repetition_penalty": [1]}, "repetition_penalty must be a number"),
        ({"n": 0}, "n must be"),
        ({"n": 129}, "n must be"),
        ({"n": True}, "n must be"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"logprobs": 5}, "logprobs must be true or false"),
        ({"return_token_ids": 1}, "return_token_ids must be true or false"),
        ({"stream": True, "stream_options": []}, "stream_options must be an object"),
    ],
)
def test_a_malformed_field_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        chat(**fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"prompt": None}, "prompt must be"), ({"prompt": ""}, "prompt must be"), ({"echo": True}, "echo is not")],
)
def test_a_malformed_completion_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        completion(**fields)


def test_a_request_nested_too_deep_to_be_written_again_is_refused() -> None:
    deep = b"[" * 500 + b"]" * 500
    call = CHAT.read(b'{"messages": [{"role": "user"}], "tools": %s}' % deep, AROUND)
    for plain in (True, False):
        with pytest.raises(BadRequest, match="cannot be passed on"):
            asked(call, plain=plain)


MESSAGES = st.lists(objects_with("role", "content", "tool_calls", "reasoning") | JSON, max_size=3)
CALLS = st.lists(st.fixed_dictionaries({"function": objects_with("arguments", "name") | JSON}) | JSON, max_size=2)
ROLES = st.sampled_from(["user", "assistant", "tool", "system"])
GOOD_ENOUGH = st.lists(
    st.fixed_dictionaries({"role": ROLES}, optional={"content": JSON, "tool_calls": CALLS, "reasoning": JSON}),
    min_size=1,
    max_size=3,
)
FIELDS = objects_with(
    *("n", "stream", "stream_options", "logprobs", "temperature", "top_p", "max_tokens", "max_completion_tokens"),
    *("tool_choice", "response_format", "logit_bias", "min_tokens", "echo", "tools", "return_token_ids", "x"),
)


@given(FIELDS, MESSAGES | GOOD_ENOUGH, st.sampled_from(DIALECTS), JSON)
def test_whatever_is_asked_is_a_call_or_a_bad_request(
    fields: dict[str, Any], messages: list[Any], dialect: Dialect, prompt: Any
) -> None:
    raw = json.dumps({**fields, "messages": messages, "prompt": prompt}).encode()
    try:
        call = dialect.read(raw, AROUND)
        body = asked(call)
    except BadRequest:
        return
    assert body["max_tokens"] <= 64
    assert 1 <= call.choices_per_prompt <= 128


@given(FIELDS, GOOD_ENOUGH)
def test_a_call_asks_again_for_what_it_asked(fields: dict[str, Any], messages: list[Any]) -> None:
    """Reading what was sent changes nothing more."""
    try:
        call = CHAT.read(json.dumps({**fields, "messages": messages}).encode(), AROUND)
        body = asked(call)
    except BadRequest:
        return
    again = CHAT.read(json.dumps(body).encode(), AROUND)
    assert asked(again) == body
    assert untrainable_reason(again.request) == untrainable_reason(call.request)
