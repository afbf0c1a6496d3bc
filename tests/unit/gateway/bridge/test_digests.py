import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.gateway.dialects.openai import repair_messages

from stepwell.gateway.bridge.digests import conversation_digest_of, digest_request, read_conversation_digest, thought_of
from tests.unit.gateway.dialects.asking import JSON

USER = {"role": "user", "content": "hello"}


def assistant(content: Any = None, *calls: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    written = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": written} if written else {}), **more}


def result(call_id: str, content: str = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def whole(*messages: dict[str, Any], **more: Any) -> str:
    return digest_request({"messages": messages, **more}).whole


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, {"role": "user", "content": [{"type": "text", "text": "hello"}]}),
        (assistant(None, ("a", "add", "{}")), assistant("", ("a", "add", ""))),
        (assistant(None, ("a", "add", '{"x": 1, "y": 2}')), assistant([], ("b", "add", '{"y":2,"x":1}'))),
        (assistant("hi"), {**assistant("hi"), "refusal": None, "annotations": [], "audio": None, "tool_calls": []}),
        (assistant("hi", reasoning="hm"), assistant("hi")),
    ],
)
def test_messages_that_a_template_cannot_tell_apart_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert whole(USER, one) == whole(USER, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (USER, {**USER, "content": "hello "}),
        (USER, {**USER, "role": "system"}),
        (USER, {**USER, "name": "Ann"}),
        ({**USER, "content": "a\nb"}, {**USER, "content": [{"type": "text", "text": t} for t in "ab"]}),
        (assistant(None, ("a", "add", '{"x": 1}')), assistant(None, ("a", "add", '{"x": 2}'))),
        (assistant(None, ("a", "add", '{"x": 1}')), assistant(None, ("a", "sub", '{"x": 1}'))),
        (assistant(None, ("a", "add", f'{{"x": {2**70}}}')), assistant(None, ("a", "add", f'{{"x": {2**70 + 1}}}'))),
        (assistant(None, ("a", "add", "{}")), assistant(None, ("a", "add", "{}"), ("b", "add", "{}"))),
    ],
)
def test_messages_that_differ_have_different_digests(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert whole(USER, one) != whole(USER, other)


@pytest.mark.parametrize(
    ("served", "sent_back"),
    [
        (assistant(None, ("a", "add", '{"x": 5.0, "y": [-1e2]}')), assistant(None, ("a", "add", '{"x":5,"y":[-100]}'))),
        (assistant("\n\n", ("a", "add", "{}")), assistant(None, ("a", "add", "{}"))),
    ],
)
def test_what_clients_send_back_in_another_form_is_the_same(served: dict[str, Any], sent_back: dict[str, Any]) -> None:
    assert whole(USER, served) == whole(USER, sent_back)
    assert whole(USER, {**USER, "content": "\n\n"}) != whole(USER, {**USER, "content": ""})
    assert whole(USER, assistant(None, ("a", "f", '{"x": 5.5}'))) != whole(
        USER, assistant(None, ("a", "f", '{"x": 5}'))
    )


def test_an_argument_that_has_its_default_counts_as_left_out() -> None:
    properties = {"path": {"type": "string"}, "all": {"type": "boolean", "default": False}, "n": {"default": 5.0}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {"properties": properties}}}]
    asked = digest_request({"messages": [USER], "tools": tools})
    served = conversation_digest_of(asked, assistant(None, ("a", "edit", '{"path": "x"}')), {}).replied

    def sent_back(arguments: str, name: str = "edit") -> str:
        return whole(USER, assistant(None, ("a", name, arguments)), tools=tools)

    assert sent_back('{"all":false,"path":"x"}') == served
    assert sent_back('{"path": "x", "n": 5}') == served
    assert sent_back('{"path": "x", "all": 0}') != served
    assert sent_back('{"path": "x", "all": true}') != served
    assert sent_back('{"all": false}') != served
    assert whole(USER, assistant(None, ("a", "edit", '{"path": "x", "all": false}'))) != served


def test_a_tools_answer_counts_by_the_place_of_its_call() -> None:
    calls = assistant(None, ("a", "add", "{}"), ("b", "add", "{}"))
    renamed = assistant(None, ("x", "add", "{}"), ("y", "add", "{}"))
    assert whole(calls, result("a"), result("b")) == whole(renamed, result("x"), result("y"))
    assert whole(calls, result("a"), result("b")) != whole(calls, result("b"), result("a"))


def test_the_order_of_messages_and_what_is_in_which_message_count() -> None:
    other = {"role": "user", "content": "there"}
    assert len({whole(USER, other), whole(other, USER), whole({**USER, "content": "hellothere"})}) == 3


def test_tools_and_the_fields_of_the_template_have_digests_of_their_own() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    plain = digest_request({"messages": [USER]})
    assert digest_request({"messages": [USER], "tools": tools}).tools != plain.tools
    assert digest_request({"messages": [USER], "tools": tools, "tool_choice": "none"}).tools != plain.tools
    assert digest_request({"messages": [USER], "tools": []}).tools == plain.tools
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert digest_request({"messages": [USER], **kwargs}).template != plain.template
    assert digest_request({"messages": [USER]}, "the template of an engine").template != plain.template
    assert digest_request({"messages": [USER], "temperature": 0.5, "seed": 3}) == plain


def test_only_text_is_text() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert digest_request({"messages": [USER]}).is_text
    assert not digest_request({"messages": [USER, image, USER]}).is_text
    hidden = {"type": "text", "text": USER["content"], "uuid": "u", "image_url": "data:"}
    with_hidden = digest_request({"messages": [{"role": "user", "content": [hidden]}]})
    assert not with_hidden.is_text
    assert with_hidden.whole != digest_request({"messages": [USER]}).whole


def test_a_reply_is_what_its_client_sends_back() -> None:
    served = assistant("hm", ("a", "add", '{"x":1}'), ("b", "add", "no JSON"), reasoning="first this")
    asked = digest_request({"messages": [USER]})
    lineage = conversation_digest_of(asked, served, {})
    sent_back = json.loads(json.dumps([USER, served, result("a")]))
    assert repair_messages(sent_back) == 1
    later = digest_request({"messages": sent_back})
    assert (later.asked, later.replied, later.reply_at) == (lineage.asked, lineage.replied, 1)
    assert later.thoughts == lineage.thoughts
    assert later.thoughts.keys() == {1}


def test_thinking_in_the_content_is_noticed() -> None:
    asked = digest_request({"messages": [USER, assistant("<think>no</think>yes"), USER]})
    assert asked.thoughts == {1: "</think>"}
    assert conversation_digest_of(asked, assistant("[THINK]a[/THINK]b"), {0: "x"}).thoughts == {
        0: "x",
        1: "</think>",
        3: "[/THINK]",
    }


def test_a_lineage_is_read_as_it_was_stored() -> None:
    lineage = conversation_digest_of(digest_request({"messages": [USER]}), assistant("a", reasoning="b"), {})
    assert read_conversation_digest(json.loads(json.dumps(lineage.to_json()))) == lineage
    assert read_conversation_digest({}) is None


@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "assistant"]), "content": JSON})))
def test_any_content_has_a_digest(messages: list[dict[str, Any]]) -> None:
    assert digest_request({"messages": messages}) == digest_request({"messages": json.loads(json.dumps(messages))})


def test_blanks_around_reasoning_do_not_count() -> None:
    """Models end it with a line break, and qwen-code sends it back without."""
    served = {"reasoning": "\nFirst I look.\n\n"}
    assert thought_of(served) == thought_of({"reasoning_content": "First I look."})
    assert thought_of(served) != thought_of({"reasoning": "First I  look."})


def test_empty_reasoning_is_none() -> None:
    """Engines report it under one name, and the history has it under two."""
    assert thought_of({"reasoning": "", "reasoning_content": ""}) == thought_of({"reasoning": ""}) == ""
    assert thought_of({"reasoning": "\n"}) == ""
