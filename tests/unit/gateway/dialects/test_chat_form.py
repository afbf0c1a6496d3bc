from stepwell.access.access_keys import AccessKeys
from stepwell.gateway.dialects.chat_form import (
    EchoedSteps,
    StepSeal,
    assistant_message,
    function_tool,
    image_part,
    joined_parts,
    text_part,
    tool_call,
)

SEAL = StepSeal(AccessKeys(["control-key-of-the-tests"]))
FIRST, SECOND = "a" * 32, "b" * 32


def test_echoed_steps_are_in_the_order_of_the_history_each_once() -> None:
    echoed = EchoedSteps(SEAL)
    assert echoed.detach(SEAL.attach("call-2", SECOND)) == "call-2"
    echoed.note(SEAL.seal(FIRST))
    assert echoed.detach(SEAL.attach("call-3", SECOND)) == "call-3"
    assert echoed.uids() == (SECOND, FIRST)


def test_a_seal_of_others_proves_nothing_and_stays_in_its_id() -> None:
    echoed = EchoedSteps(SEAL)
    stranger = StepSeal(AccessKeys(["another-key-of-the-tests"]))
    for text in (stranger.attach("call-1", FIRST), "toolu_1", "", "é" * 60):
        assert echoed.detach(text) == text
        echoed.note(text)
    assert echoed.uids() == ()


def test_texts_are_lines_of_one_text_unless_an_image_is_among_them() -> None:
    texts = [text_part("a"), text_part("b")]
    assert joined_parts(texts) == "a\nb"
    assert joined_parts([]) == ""
    assert joined_parts([*texts, image_part("data:x")]) == [*texts, image_part("data:x")]


def test_an_assistants_message_without_text_is_null_only_with_tool_calls() -> None:
    call = tool_call("1", "add", "{}")
    assert assistant_message("", "", [call]) == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert assistant_message("", "", []) == {"role": "assistant", "content": ""}
    thought = assistant_message("hi", "hm", [])
    assert thought == {"role": "assistant", "content": "hi", "reasoning": "hm", "reasoning_content": "hm"}


def test_a_tool_has_only_what_is_known_of_it() -> None:
    assert function_tool("add", None, None) == {"type": "function", "function": {"name": "add"}}
    whole = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    assert function_tool("add", "Adds.", {"type": "object"}, strict=True) == {"type": "function", "function": whole}
