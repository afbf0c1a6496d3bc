import json
import math
from typing import Any

import pytest

from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.wire.chat import ChatCall, read_call, read_reply

HELLO = [{"role": "user", "content": "hello"}]


def call(**fields: Any) -> ChatCall:
    return read_call(json.dumps({"model": "m", "messages": HELLO, **fields}).encode(), response_length=64)


def sent(**fields: Any) -> dict[str, Any]:
    return dict(json.loads(call(**fields).body))


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token": "h", "logprob": -0.5}, {"token": "i", "logprob": -1.5}]},
        **changes,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"id": "x", "prompt_token_ids": [1, 2, 3], "choices": [choice], "usage": usage}


def test_the_engine_is_asked_for_ids_and_logprobs_and_everything_else_passes() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = sent(temperature=0.5, tools=tools, some_future_field={"a": 1})
    assert body["return_token_ids"] is body["logprobs"] is True
    assert (body["messages"], body["tools"], body["some_future_field"]) == (HELLO, tools, {"a": 1})


def test_fields_that_reach_past_the_request_are_taken_out() -> None:
    for name in ("kv_transfer_params", "vllm_xargs", "chat_template", "cache_salt"):
        assert name not in sent(**{name: "x"})


@pytest.mark.parametrize(
    ("asked", "in_force"),
    [
        ({}, 64),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 100}, 64),
        ({"max_completion_tokens": 5, "max_tokens": 10}, 5),
        ({"max_tokens": None}, 64),
    ],
)
def test_no_answer_is_longer_than_a_trainer_takes(asked: dict[str, Any], in_force: int) -> None:
    assert sent(**asked)["max_tokens"] == in_force
    assert call(**asked).sampling["max_tokens"] == in_force


def test_the_sampling_parameters_are_recorded() -> None:
    assert call(temperature=0.7, seed=3, user="u").sampling == {"temperature": 0.7, "seed": 3, "max_tokens": 64}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "messages must be a list"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": ["x"], "stream": true}', "streaming is not supported yet"),
        (b'{"messages": ["x"], "max_tokens": "many"}', "max_tokens must be a whole number"),
        (b'{"messages": ["x"], "max_tokens": 0}', "at least 1, not 0"),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(raw: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_call(raw, response_length=64)


def test_the_answer_is_split_into_what_is_recorded_and_what_the_agent_asked_for() -> None:
    reply = read_reply(json.dumps(answer()).encode(), call())
    (sampled,) = reply.choices
    assert sampled.prompt_ids.tolist() == [1, 2, 3]
    assert sampled.response_ids.tolist() == [7, 8]
    assert sampled.logprobs is not None
    assert sampled.logprobs.tolist() == [-0.5, -1.5]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 2)
    body = json.loads(reply.body)
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None
    assert body["choices"][0]["message"]["content"] == "hi"


def test_an_agent_that_asked_for_ids_and_logprobs_gets_them() -> None:
    reply = read_reply(json.dumps(answer()).encode(), call(logprobs=True, return_token_ids=True))
    assert json.loads(reply.body) == answer()


@pytest.mark.parametrize(
    "ids", [None, "no", [1, "x"], [1, None], [2**40]], ids=["null", "text", "mixed", "holes", "huge"]
)
def test_unreadable_ids_are_no_ids(ids: object) -> None:
    (sampled,) = read_reply(json.dumps(answer(token_ids=ids)).encode(), call()).choices
    assert len(sampled.response_ids) == 0


@pytest.mark.parametrize("logprobs", [None, [], {"content": None}, {"content": [{"token": "x"}]}, {"content": ["x"]}])
def test_unreadable_logprobs_are_no_logprobs(logprobs: object) -> None:
    (sampled,) = read_reply(json.dumps(answer(logprobs=logprobs)).encode(), call()).choices
    assert sampled.logprobs is None


def test_a_logprob_of_null_or_nan_stays_visible_as_nan() -> None:
    for value in (None, math.nan):
        raw = json.dumps(answer(logprobs={"content": [{"logprob": value}, {"logprob": -1.0}]})).encode()
        (sampled,) = read_reply(raw, call()).choices
        assert sampled.logprobs is not None
        assert math.isnan(sampled.logprobs[0])


@pytest.mark.parametrize(("raw", "why"), [(b"<html>", "not JSON"), (b"[]", "not a JSON object"), (b"{}", "no choices")])
def test_an_unreadable_answer_is_the_engines_failure(raw: bytes, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        read_reply(raw, call())
