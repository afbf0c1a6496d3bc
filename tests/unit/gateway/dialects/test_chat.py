import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.gateway.dialects.openai import repair_messages

from stepwell.gateway.dialects.openai_choices import copy_reasoning


def calling(arguments: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


def arguments_of(messages: list[dict[str, Any]]) -> Any:
    return messages[0]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("written", ['{"a": ', "not json", "[1]", '"text"', "3", "null", "  ", "[" * 5000])
def test_arguments_that_are_no_object_are_passed_on_inside_one(written: str) -> None:
    messages = calling(written)
    assert repair_messages(messages) == 1
    assert json.loads(arguments_of(messages)) == {"malformed": written}


@pytest.mark.parametrize(
    "written", ["{}", '{"a": 1}', ' {"a":\n1} ', "", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1%s}' % ("0" * 400)]
)
def test_arguments_that_an_engine_can_read_stay_as_the_model_wrote_them(written: str) -> None:
    messages = calling(written)
    assert repair_messages(messages) == 0
    assert arguments_of(messages) == written


@pytest.mark.parametrize("written", [None, {"a": 1}, 5])
def test_arguments_that_are_no_text_are_the_engines_to_judge(written: Any) -> None:
    messages = calling(written)
    assert repair_messages(messages) == 0
    assert arguments_of(messages) == written


@given(st.text())
def test_after_mending_arguments_are_empty_or_an_object_that_keeps_the_text(written: str) -> None:
    messages = calling(written)
    malformed = repair_messages(messages)
    mended = arguments_of(messages)
    assert mended == "" or isinstance(json.loads(mended), dict)
    assert (json.loads(mended)["malformed"] if malformed else mended) == written


def test_every_call_of_every_message_is_looked_at() -> None:
    bad = {"function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "assistant", "tool_calls": [bad, "odd", {"function": None}, {**bad, "function": dict(bad)}]}]
    messages += [*calling("[]"), {"role": "user", "content": "x"}]
    assert repair_messages(messages) == 2


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_goes_by_both_names(name: str) -> None:
    message: dict[str, Any] = {"role": "assistant", name: "hm"}
    repair_messages([message])
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")


def test_two_different_thoughts_stay_two_and_none_stays_none() -> None:
    message = {"reasoning": "a", "reasoning_content": "b"}
    copy_reasoning(message)
    assert message == {"reasoning": "a", "reasoning_content": "b"}
    message = {"content": "x"}
    copy_reasoning(message)
    assert message == {"content": "x"}
