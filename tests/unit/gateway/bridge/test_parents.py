from typing import Any

import pytest
from stepwell.gateway.bridge.recorded_turns import (
    NO_THINKING,
    BridgeOutcome,
    CannotBridge,
    ThinkingPlaces,
    ThinkingPolicy,
    Turn,
    find_parent,
    thinking_to_prove,
)

from stepwell.gateway.bridge.digests import conversation_digest_of, digest_request
from stepwell.steps.step import ids_array

ALL, TOOL_CYCLE, TEMPLATE = ThinkingPolicy.ALL, ThinkingPolicy.TOOL_CYCLE, ThinkingPolicy.TEMPLATE
USER = {"role": "user", "content": "hello"}
NEXT = {"role": "user", "content": "go on"}
TOOL = {"role": "tool", "tool_call_id": "a", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def turn(uid: str, messages: list[dict[str, Any]], reply: dict[str, Any], **more: Any) -> Turn:
    finish, tokens = more.pop("finish", "stop"), more.pop("tokens", [1, 2, 3])
    inherited = more.pop("inherited", {})
    asked = digest_request({"messages": messages, **more})
    return Turn(uid, ids_array(tokens), finish, conversation_digest_of(asked, reply, inherited))


FIRST = turn("1", [USER], said("hi"))
SECOND = turn("2", [USER, said("hi"), NEXT], said("there"), tokens=[1, 2, 3, 4, 5])


def parent_of(turns: list[Turn], *messages: dict[str, Any], echoed: tuple[str, ...] = (), **more: Any) -> Turn:
    return find_parent(turns, digest_request({"messages": messages, **more}), echoed)


def refused(turns: list[Turn], *messages: dict[str, Any], **more: Any) -> BridgeOutcome:
    with pytest.raises(CannotBridge) as why:
        parent_of(turns, *messages, **more)
    return why.value.outcome


def test_the_step_whose_messages_and_reply_begin_the_request_is_the_parent() -> None:
    assert parent_of([FIRST, SECOND], USER, said("hi"), NEXT) is FIRST
    assert parent_of([FIRST, SECOND], USER, said("hi"), NEXT, said("there"), TOOL, NEXT) is SECOND


def test_an_edited_reply_an_edited_question_and_an_added_reply_have_no_parent() -> None:
    turns = [FIRST, SECOND]
    assert refused(turns, USER, said("hi!"), NEXT) is BridgeOutcome.EDITED
    assert refused(turns, NEXT, said("hi"), NEXT) is BridgeOutcome.NO_PARENT
    assert refused(turns, USER, said("hi"), NEXT, said("there"), said("more"), NEXT) is BridgeOutcome.NO_PARENT
    assert refused(turns, {**USER, "content": "x"}, said("a"), NEXT, echoed=("1",)) is BridgeOutcome.EDITED


def test_other_tools_or_template_fields_have_no_parent() -> None:
    request = [USER, said("hi"), NEXT]
    assert refused([FIRST], *request, tools=TOOLS) is BridgeOutcome.TOOLS_CHANGED
    assert refused([FIRST], *request, chat_template_kwargs={"a": 1}) is BridgeOutcome.TEMPLATE_CHANGED
    with_tools = turn("3", [USER], said("hi"), tools=TOOLS)
    assert parent_of([FIRST, with_tools], *request, tools=TOOLS) is with_tools


@pytest.mark.parametrize("finish", ["length", "cut_short", "abort", "error", "repetition", None])
def test_a_reply_without_an_end_of_its_own_is_not_continued(finish: str | None) -> None:
    cut = turn("1", [USER], said("hi"), finish=finish)
    assert refused([cut], USER, said("hi"), NEXT) is BridgeOutcome.CUT_SHORT


def test_of_steps_that_look_alike_only_an_echoed_one_is_the_parent() -> None:
    twin = turn("twin", [USER], said("hi"), tokens=[1, 2, 9])
    request = [USER, said("hi"), NEXT]
    assert refused([FIRST, twin], *request) is BridgeOutcome.AMBIGUOUS
    assert parent_of([FIRST, twin], *request, echoed=("twin",)) is twin
    assert parent_of([FIRST, turn("same", [USER], said("hi"))], *request) is FIRST


def test_thinking_may_be_left_out_but_not_replaced() -> None:
    thinker = turn("1", [USER], said("hi", reasoning="hm"))
    assert parent_of([thinker], USER, said("hi"), NEXT) is thinker
    assert parent_of([thinker], USER, said("hi", reasoning="hm"), NEXT) is thinker
    assert refused([thinker], USER, said("hi", reasoning="ah"), NEXT) is BridgeOutcome.EDITED
    assert refused([FIRST], USER, said("hi", reasoning="hm"), NEXT) is BridgeOutcome.EDITED


def places(policy: ThinkingPolicy, parent: Turn, *messages: dict[str, Any]) -> ThinkingPlaces | None:
    """None if the bridge would show thinking that the policy leaves out."""
    try:
        return thinking_to_prove(policy, parent, digest_request({"messages": messages}), messages)
    except CannotBridge:
        return None


def test_a_policy_decides_which_thinking_a_bridge_may_show() -> None:
    reply = said("hi", reasoning="hm")
    thinker = turn("1", [USER], reply)
    assert [places(policy, FIRST, USER, said("hi"), NEXT) for policy in ThinkingPolicy] == [NO_THINKING] * 3
    for sent in (reply, said("hi")):
        assert places(ALL, thinker, USER, sent, NEXT) == NO_THINKING
        assert places(TOOL_CYCLE, thinker, USER, sent, TOOL) == NO_THINKING
        assert places(TOOL_CYCLE, thinker, USER, sent, TOOL, NEXT) is None
    assert places(TEMPLATE, thinker, USER, said("hi"), TOOL) is None
    assert places(TEMPLATE, thinker, USER, reply, TOOL) == ThinkingPlaces(in_reply=True)


def test_the_template_is_asked_about_the_places_where_there_is_thinking() -> None:
    history = [USER, said("a", reasoning="1"), NEXT, said("b", reasoning="2"), TOOL]
    parent = turn("1", history, said("c"))
    assert places(TEMPLATE, parent, *history, said("c"), TOOL) == ThinkingPlaces(earlier_turns=True, this_turn=True)
    inline = turn("1", [USER], said("<think>1</think>c"))
    expected = ThinkingPlaces(in_reply=True, is_inline=True)
    assert places(TEMPLATE, inline, USER, said("<think>1</think>c"), TOOL) == expected
    unknown = turn("1", [USER], said("[THINK]1[/THINK]c"))
    assert places(TEMPLATE, unknown, USER, said("[THINK]1[/THINK]c"), TOOL) is None


def test_thinking_that_a_bridge_kept_counts_although_the_client_never_sent_it() -> None:
    bridged = turn("1", [USER, said("a"), TOOL], said("b"), inherited={1: "abc"})
    assert places(TOOL_CYCLE, bridged, USER, said("a"), TOOL, said("b"), NEXT) is None
    assert places(TEMPLATE, bridged, USER, said("a"), TOOL, said("b"), TOOL) is None
