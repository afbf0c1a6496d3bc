"""What was said after a step, found among the steps that follow it."""

from typing import Any

import numpy as np
from stepwell.rewards.builtin.next_state_rules import NextState, Utterance, next_states

from rig.chatml import render_chat
from stepwell.rewards.sample import SampleStep

USER, ASSISTANT, TOOL, SYSTEM = "user", "assistant", "tool", "system"
SIDE_CALL = "side_call: a title was asked for"
NO_IDS = np.zeros(1, np.int32)


def call(response: str, *messages: tuple[str, str], untrainable: str | None = None) -> SampleStep:
    """A step with this conversation as its prompt."""
    rendered = render_chat([{"role": role, "content": content} for role, content in messages])
    return raw(rendered, response, untrainable=untrainable)


def raw(prompt: str, response: str, **fields: Any) -> SampleStep:
    return SampleStep(prompt_ids=NO_IDS, response_ids=NO_IDS, texts=(prompt, response), **fields)


def texts(state: NextState | None) -> list[str]:
    assert state is not None
    return [each.text for each in state.utterances]


ASKED = ((SYSTEM, "Be kind."), (USER, "What is 2 + 2?"))


def test_the_next_message_of_the_user_follows_the_reply_and_the_last_step_has_none() -> None:
    steps = [call("4", *ASKED), call("Five", *ASKED, (ASSISTANT, "4"), (USER, "And 2 + 3?"))]
    first, last = next_states(steps)
    assert first == NextState("What is 2 + 2?", "4", (Utterance("user", "And 2 + 3?"),))
    assert last is None


def test_each_step_gets_what_came_directly_after_it() -> None:
    history = (*ASKED, (ASSISTANT, "4"), (USER, "Thanks"), (ASSISTANT, "Welcome"), (USER, "Bye"))
    steps = [call("4", *ASKED), call("Welcome", *history[:4]), call("Bye", *history)]
    assert [texts(state) for state in next_states(steps)[:2]] == [["Thanks"], ["Bye"]]


def test_results_of_tools_are_told_from_the_user_also_where_the_template_has_no_role_for_them() -> None:
    answers = ((TOOL, "exit code 1"), (USER, "<tool_response>\n7\n</tool_response>"), (USER, "Hurry"))
    first, _ = next_states([call("run", *ASKED), call("x", *ASKED, (ASSISTANT, "run"), *answers)])
    assert first is not None
    assert [each.speaker for each in first.utterances] == ["tool", "tool", "user"]


def test_reasoning_that_the_template_removes_does_not_hide_the_continuation() -> None:
    steps = [call("<think>hm</think>\n\n4", *ASKED), call("x", *ASKED, (ASSISTANT, "4"), (USER, "Why?"))]
    assert texts(next_states(steps)[0]) == ["Why?"]


def test_side_calls_and_sub_agents_in_between_are_passed_over() -> None:
    steps = [
        call("search", *ASKED),
        call("A title", *ASKED, (ASSISTANT, "search"), (USER, "Write a title"), untrainable=SIDE_CALL),
        call("found", (USER, "Search for 4")),
        call("done", (USER, "Search for 4"), (ASSISTANT, "found"), (TOOL, "no")),
        call("4", *ASKED, (ASSISTANT, "search"), (TOOL, "found")),
    ]
    states = next_states(steps)
    assert texts(states[0]) == ["found"]
    assert texts(states[2]) == ["no"]
    assert [states[1], states[3], states[4]] == [None, None, None]


def test_of_two_answers_to_one_prompt_only_the_one_that_was_kept_is_continued() -> None:
    steps = [call("4", *ASKED), call("Five", *ASKED), call("x", *ASKED, (ASSISTANT, " Five"), (USER, "No!"))]
    states = next_states(steps)
    assert states[0] is None
    assert texts(states[1]) == ["No!"]


def test_a_prompt_that_was_sent_again_with_more_before_the_reply_is_no_continuation() -> None:
    steps = [call("4", *ASKED), call("x", *ASKED, (USER, "Hello?"))]
    assert next_states(steps) == [None, None]


def test_reminders_of_the_harness_are_not_said_by_the_user() -> None:
    reminded = "<system-reminder>\nThat's wrong\n</system-reminder>Go on"
    steps = [call("4", *ASKED), call("x", *ASKED, (ASSISTANT, "4"), (USER, reminded))]
    assert texts(next_states(steps)[0]) == ["Go on"]


def test_an_unknown_template_is_read_as_text() -> None:
    prompt = "<start_of_turn>user\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>model\n"
    more = "<end_of_turn>\n<start_of_turn>user\nNo, five<end_of_turn>\n<start_of_turn>model\n"
    first, last = next_states([raw(prompt, "4"), raw(f"{prompt}4{more}", "ok")])
    assert texts(first) == ["No, five"]
    assert last is None
    assert next_states([raw(prompt, "4"), raw("something else", "ok")]) == [None, None]
