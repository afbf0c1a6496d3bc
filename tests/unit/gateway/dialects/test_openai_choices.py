import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import EngineUnavailable
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.dialects.openai_choices import ChoicesReply, read_reply
from stepwell.wire.openai import Sampled, Usage
from tests.unit.gateway.dialects.asking import ODD_JSON, VLLM, chat, completion, objects_with, shown


def make_choice(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token": "h", "logprob": -0.5}, {"token": "i", "logprob": -1.5}]},
        **changes,
    }


def answer(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"id": "x", "prompt_token_ids": [1, 2, 3], "choices": list(choices), "usage": usage, **changes}


def read(message: dict[str, Any], call: ModelCall | None = None) -> ChoicesReply:
    return read_reply(json.dumps(message).encode(), VLLM, keep_ids=(call or chat()).wants.ids)


def shown_of(message: dict[str, Any], call: ModelCall) -> Any:
    """What the agent gets."""
    return json.loads(shown(call, read(message, call)))


def read_one(**changes: Any) -> Sampled:
    (sampled,) = read(answer(make_choice(**changes))).choices
    return sampled


def test_the_answer_is_split_into_what_is_recorded_and_what_the_agent_asked_for() -> None:
    reply = read(answer(make_choice(), prompt_text="t"))
    (sampled,) = reply.choices
    assert (sampled.prompt_ids.tolist(), sampled.response_ids.tolist()) == ([1, 2, 3], [7, 8])
    assert sampled.logprobs is not None
    assert sampled.logprobs.tolist() == [-0.5, -1.5]
    assert reply.usage == Usage(3, 2)
    body = json.loads(shown(chat(), reply))
    assert not {"prompt_token_ids", "prompt_text"} & set(body)
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi"}


def test_the_model_that_the_engine_names_is_known() -> None:
    assert [one.model for one in read(answer(make_choice(), make_choice(index=1), model="lora")).choices] == [
        "lora"
    ] * 2
    assert read_one().model == ""


def test_an_agent_that_asked_for_ids_and_logprobs_gets_them() -> None:
    whole = answer(make_choice())
    assert shown_of(whole, chat(logprobs=True, return_token_ids=True)) == whole


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_reaches_the_agent_by_both_names_or_not_at_all(name: str) -> None:
    whole = answer(make_choice(message={"role": "assistant", "content": "hi", name: "hm"}))
    message = shown_of(whole, chat())["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
    hidden = shown_of(whole, chat(include_reasoning=False))["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "hi"}


def test_choices_of_one_chat_share_its_prompt() -> None:
    reply = read(answer(make_choice(), make_choice(index=1, token_ids=[9, 9])), chat(n=2))
    assert [choice.prompt_ids.tolist() for choice in reply.choices] == [[1, 2, 3]] * 2
    assert [choice.response_ids.tolist() for choice in reply.choices] == [[7, 8], [9, 9]]


def test_completions_of_several_prompts_keep_each_its_own() -> None:
    def one(index: int, prompt: list[int]) -> dict[str, Any]:
        flat = {"tokens": ["a"], "token_logprobs": [-0.25]}
        return {"index": index, "text": "a", "logprobs": flat, "token_ids": [7], "prompt_token_ids": prompt}

    whole = {"choices": [one(0, [1]), one(1, [2, 3])], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    call = completion(prompt=["a", "b"])
    reply = read(whole, call)
    assert [choice.prompt_ids.tolist() for choice in reply.choices] == [[1], [2, 3]]
    assert [choice.logprobs.tolist() for choice in reply.choices if choice.logprobs is not None] == [[-0.25]] * 2
    told = json.loads(shown(call, reply))["choices"]
    assert told == [{"index": index, "text": "a", "logprobs": None} for index in (0, 1)]


@pytest.mark.parametrize(
    "ids",
    [None, "no", {}, [1, "2"], [1, None], [2**40], [1.5], [[1], [2]]],
    ids=["null", "text", "object", "texts", "holes", "huge", "fractions", "nested"],
)
def test_unreadable_ids_are_no_ids(ids: object) -> None:
    assert read_one(token_ids=ids).response_ids.tolist() == []


@pytest.mark.parametrize(
    "logprobs",
    [
        *(None, [], {"content": None}, {"content": [{"token": "x"}]}, {"content": ["x"]}),
        *({"content": [{"logprob": "-1"}]}, {"token_logprobs": [[-1]]}, {"token_logprobs": [-1, {}]}),
    ],
)
def test_unreadable_logprobs_are_no_logprobs(logprobs: object) -> None:
    assert read_one(logprobs=logprobs).logprobs is None


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_logprob_of_null_or_nan_stays_visible_as_nan(value: float | None) -> None:
    logprobs = read_one(logprobs={"content": [{"logprob": value}, {"logprob": -1.0}]}).logprobs
    assert logprobs is not None
    assert math.isnan(logprobs[0])
    assert logprobs[1] == -1.0


@pytest.mark.parametrize("usage", [None, [], {}, {"prompt_tokens": "3", "completion_tokens": [2]}])
def test_an_unreadable_count_is_no_count(usage: Any) -> None:
    assert read(answer(make_choice(), usage=usage)).usage == Usage(None, None)


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    raw = json.dumps(answer(make_choice())).encode().replace(b'"hi"', b'"h\xff"')
    reply = read_reply(raw, VLLM, keep_ids=False)
    assert json.loads(shown(chat(), reply))["choices"][0]["message"]["content"] == "h�"
    assert reply.choices[0].response_ids.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no choices"),
        (b'{"choices": []}', "no choices"),
        (b'{"choices": ["x"]}', "no choices"),
        (b'{"choices": [{}], "x": "\\ud800"}', "not JSON"),
        (b'{"choices": [{}], "x": %s}' % (b"1" * 400), "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"choices": [{}], "x": %s}' % (b"[" * 500 + b"]" * 500), "cannot be passed on"),
    ],
    ids=["page", "list", "empty", "no choice", "no object", "surrogate", "huge", "nested", "too deep to write"],
)
def test_an_unreadable_answer_is_the_engines_failure(raw: bytes, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        shown(chat(), read_reply(raw, VLLM, keep_ids=False))


def test_what_was_written_is_known_as_text_where_it_was_text_alone() -> None:
    def texts(**message: Any) -> list[str | None]:
        return read(answer(make_choice(message={"role": "assistant", **message}))).texts()

    assert texts(content="hi") == ["hi"]
    assert texts(content="hi", tool_calls=[{"id": "c"}]) == [None]
    assert texts(content="hi", reasoning_content="hm") == [None]
    assert texts(content=None) == [None]
    assert read(answer({"index": 0, "text": "so"}), completion()).texts() == ["so"]


def test_one_aborted_choice_makes_an_aborted_answer() -> None:
    assert read(answer(make_choice(), make_choice(finish_reason="abort"))).is_aborted
    assert not read(answer(make_choice())).is_aborted


CHOICES = st.lists(
    objects_with(
        *("message", "text", "finish_reason", "token_ids", "logprobs", "prompt_token_ids", "index"), values=ODD_JSON
    ),
    min_size=1,
    max_size=3,
)


@given(objects_with("prompt_token_ids", "usage", "id", values=ODD_JSON), CHOICES | ODD_JSON, st.booleans())
def test_whatever_an_engine_answers_is_a_reply_or_its_failure(rest: Any, choices: Any, as_chat: bool) -> None:
    call = chat() if as_chat else completion()
    try:
        reply = read({**rest, "choices": choices}, call)
        json.loads(shown(call, reply))
    except EngineUnavailable:
        return
    assert len(reply.texts()) == len(reply.choices) == len(choices)
    for sampled in reply.choices:
        assert sampled.response_ids.ndim == sampled.prompt_ids.ndim == 1
        assert sampled.logprobs is None or sampled.logprobs.ndim == 1
