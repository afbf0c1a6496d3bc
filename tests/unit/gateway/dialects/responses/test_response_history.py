from typing import Any

import pytest
from stepwell.gateway.dialects.responses_input import LONGEST_TEXT, decode_reasoning, encode_reasoning

from stepwell.errors import BadRequest
from tests.unit.gateway.dialects.responses.asking_responses import (
    ONE,
    SEAL,
    TWO,
    Json,
    ask,
    called,
    messages,
    returned,
    said,
    tool,
    tool_calls,
    user,
)

SEALED = SEAL.attach(encode_reasoning("c"), ONE)


def assistant(content: str | None = "", **fields: Any) -> Json:
    return {"role": "assistant", "content": content, **fields}


def thought(text: str) -> Json:
    return {"reasoning": text, "reasoning_content": text}


def sealed(text: str, uid: str) -> Json:
    return {"type": "reasoning", "summary": [], "encrypted_content": SEAL.attach(encode_reasoning(text), uid)}


def test_items_of_one_step_are_one_message() -> None:
    items = [user(), sealed("hm", ONE), said("hi"), called(1, ONE), called(2, ONE), returned(1, ONE), returned(2, ONE)]
    one = assistant("hi", **thought("hm"), tool_calls=tool_calls(1, 2))
    assert messages(*items) == [user(), one, tool(1), tool(2)]
    assert ask(*items).echoed == (ONE,)


def test_a_call_whose_step_has_an_output_already_joins_the_others_if_it_is_sealed() -> None:
    items = [user(), called(1, ONE), returned(1, ONE), called(2, ONE), returned(2, ONE)]
    assert messages(*items) == [user(), assistant(None, tool_calls=tool_calls(1, 2)), tool(1), tool(2)]
    unsealed = [user(), called(1), returned(1), called(2), returned(2)]
    alone = [assistant(None, tool_calls=tool_calls(number)) for number in (1, 2)]
    assert messages(*unsealed) == [user(), alone[0], tool(1), alone[1], tool(2)]


def test_items_of_two_steps_are_two_messages_although_nothing_stands_between_them() -> None:
    items = [user(), sealed("a", ONE), said("x", ONE), sealed("b", TWO), said("y", TWO)]
    assert messages(*items) == [user(), assistant("x", **thought("a")), assistant("y", **thought("b"))]
    assert ask(*items).echoed == (ONE, TWO)
    assert messages(user(), said("x"), said("y")) == [user(), assistant("x"), assistant("y")]


def test_text_after_a_call_of_the_same_answer_belongs_to_it() -> None:
    assert messages(user(), said("x"), called(1), said("y")) == [user(), assistant("xy", tool_calls=tool_calls(1))]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}]}, "a"),
        ({"summary": [{"type": "summary_text", "text": "b"}]}, "b"),
        (
            {"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": SEALED},
            "a",
        ),
        (
            {"summary": [{"type": "summary_text", "text": "b"}], "encrypted_content": SEALED},
            "c",
        ),
    ],
)
def test_reasoning_is_what_the_client_shows_else_what_was_sealed_else_the_summary(item: Json, text: str) -> None:
    assert messages(user(), {"type": "reasoning", **item}, said("x")) == [user(), assistant("x", **thought(text))]


def test_reasoning_of_another_server_is_left_out_and_proves_nothing() -> None:
    call = ask(user(), {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB" * 20}, said("x"))
    assert call.request["messages"] == [user(), assistant("x")]
    assert call.echoed == ()


def test_a_reasoning_that_is_too_long_to_be_sealed_still_proves_its_step() -> None:
    content = SEAL.attach(encode_reasoning("a" * (LONGEST_TEXT + 1)), ONE)
    assert len(content) < 100
    assert (decode_reasoning(SEAL.detach(content)[0]), SEAL.opened(content)) == ("", ONE)


def test_all_that_stands_before_the_conversation_is_one_system_message() -> None:
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    items: list[Json] = [{"role": "developer", "content": parts}, {"role": "system", "content": "d"}, user()]
    late = {"role": "developer", "content": "e"}
    expected = [{"role": "system", "content": "a\n\nb\nc\n\nd"}, user(), {"role": "system", "content": "e"}]
    assert messages(*items, late, instructions="a") == expected
    assert ask(*items, instructions="a").texts == ("a\n\nb\nc\n\nd", "go")


def test_images_and_files_are_parts_of_a_message_and_of_an_output() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:x", "detail": "auto"}]
    chat_parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    got = messages({"role": "user", "content": parts}, called(1), {**returned(1), "output": parts})
    assert (got[0]["content"], got[2]["content"]) == (chat_parts, chat_parts)
    (file,) = messages(
        {"role": "user", "content": [{"type": "input_file", "file_data": "data:y", "filename": "y.pdf"}]}
    )
    assert file["content"] == [{"type": "file", "file": {"file_data": "data:y", "filename": "y.pdf"}}]


def test_a_shells_output_may_name_the_call_or_its_item() -> None:
    action: Json = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": action, "status": "completed"}
    for named in ({"call_id": "c1"}, {"id": "lsh_1"}):
        got = messages(user(), call, {"type": "local_shell_call_output", "output": "x", **named})
        assert got[1]["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": '{"command":["ls"]}'}
        assert got[2] == {"role": "tool", "tool_call_id": "c1", "content": "x"}


def test_calls_of_custom_and_namespaced_tools_are_calls_of_their_functions() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a"b'}
    got = messages(user(), custom, called(2, namespace="crm"), called(3, namespace="mcp__x__"))
    functions = [call["function"] for call in got[1]["tool_calls"]]
    assert functions[0] == {"name": "patch", "arguments": r'{"input":"a\"b"}'}
    assert [function["name"] for function in functions[1:]] == ["crm__f", "mcp__x__f"]


def test_malformed_arguments_of_the_past_are_repaired_and_counted() -> None:
    call = ask(user(), called(1, arguments='{"a": '), returned(1))
    assert call.malformed_history == 1
    assert call.request["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"malformed":"{\\"a\\": "}'


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "keeps no items: send the items themselves"),
        ({"id": "msg_1"}, "item_reference"),
        ({"type": "web_search_call", "id": "ws_1"}, "an item of type web_search_call"),
        ({"type": 5}, "an item of type 5"),
        ("text", "must be an object"),
        ({"role": "tool", "content": "x"}, "role must be"),
        ({"role": "user", "content": None}, "text or a list"),
        ({"role": "user", "content": ["x"]}, "object with a type"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "part of type input_image"),
        ({"role": "assistant", "content": [{"type": "output_text"}]}, "must consist of texts"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id must be a text"),
        ({"type": "function_call_output", "call_id": "c"}, "text or a list"),
        ({"type": "local_shell_call", "call_id": "c"}, "must have an action"),
        ({"type": "reasoning", "encrypted_content": 5}, "encrypted_content must be a text"),
    ],
)
def test_what_cannot_be_translated_is_refused_with_a_reason(item: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        ask(item)
