"""When a cell is exact, and which fault it has otherwise."""

from typing import Any

import pytest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome

from stepwell.doctor.findings import EXACT, NOTHING, Finding, Grade
from stepwell.doctor.replies import DecodedText, ExaminedAnswer, ParsedReply, ToolCall
from stepwell.doctor.verdicts import (
    judge_as_chat,
    judge_bridge,
    judge_gaps,
    judge_ids,
    judge_logprobs,
    judge_mode,
    judge_prefix,
    judge_rescored,
    judge_stream,
    judge_text,
    prefix_break,
)
from stepwell.steps.step import Exactness, Step, ids_array, logprobs_array


def step(response: list[int], *, prompt: list[int] | None = None, **fields: Any) -> Step:
    given = {"response_logprobs": logprobs_array([-0.5] * len(response)), "exactness": Exactness.ENGINE, **fields}
    return Step(
        prompt_ids=ids_array(prompt or [1, 2]),
        response_ids=ids_array(response),
        trajectory_uid="t",
        prompt_uid="p",
        **given,
    )


def answer(
    text: str = "hi", *, decoded: DecodedText | None = None, reply: ParsedReply | None = None, **fields: Any
) -> ExaminedAnswer:
    told = reply or ParsedReply(text, finish_reason="stop")
    return ExaminedAnswer((told,), (step(list(text.encode()), **fields),), (decoded or DecodedText(text),))


def test_a_step_with_ids_of_the_engine_is_exact() -> None:
    assert judge_ids(answer()) == judge_logprobs(answer()) == judge_text(answer()) == EXACT


def test_a_quarantine_is_a_fault_only_in_its_column() -> None:
    of_ids = answer(quarantine="no_response_ids: none", response_logprobs=None)
    of_logprobs = answer(quarantine="bad_logprob: NaN", response_logprobs=None)
    assert (judge_ids(of_ids).grade, judge_logprobs(of_ids)) == (Grade.FAULT, NOTHING)
    assert (judge_ids(of_logprobs), judge_logprobs(of_logprobs).grade) == (EXACT, Grade.FAULT)


def test_a_call_that_failed_is_the_fault_of_its_ids() -> None:
    failed = ExaminedAnswer(failure="no engine answers")
    assert judge_ids(failed).what == "no engine answers"
    assert judge_logprobs(failed) == judge_text(failed) == judge_rescored(failed, []) == NOTHING


def test_a_choice_without_a_step_is_a_fault() -> None:
    lost = ExaminedAnswer((ParsedReply("a"), ParsedReply("b")), (step([1]),), (None,))
    assert judge_ids(lost).what == "1 steps recorded of 2 choices"


def test_ids_from_text_are_not_exact() -> None:
    assert "encoded again" in judge_ids(answer(exactness=Exactness.RETOKENIZED)).what


@pytest.mark.parametrize(
    ("said", "decoded", "finish"),
    [
        ("hi", DecodedText("hi<end>", "<end>"), "stop"),
        ("hi", DecodedText(" hi"), "stop"),
        ("a\ufffd", DecodedText("a\ufffd\ufffd"), "length"),
        ("a", DecodedText("a\ufffd<end>", "<end>"), "stop"),
        ("a\ufffdb", DecodedText("a\ufffd\ufffd<|x|>b", "b", "a\ufffd\ufffdb"), "length"),
    ],
)
def test_differences_of_decoding_alone_are_exact(said: str, decoded: DecodedText, finish: str) -> None:
    assert judge_text(answer(said, decoded=decoded, reply=ParsedReply(said, finish_reason=finish))) == EXACT


@pytest.mark.parametrize(
    ("said", "decoded", "finish"),
    [
        ("hi", DecodedText("ho"), "stop"),
        ("hi", DecodedText("hi there"), "stop"),
        ("hi", DecodedText("hi<end>", "<end>"), "length"),
        ("a\ufffdb", DecodedText("a\ufffdc"), "stop"),
    ],
)
def test_a_text_that_the_ids_do_not_decode_to_is_a_fault(said: str, decoded: DecodedText, finish: str) -> None:
    finding = judge_text(answer(said, decoded=decoded, reply=ParsedReply(said, finish_reason=finish)))
    assert finding.grade is Grade.FAULT
    assert "the ids do not decode to the text: at character" in finding.what


def test_a_stop_string_is_in_the_ids_and_not_in_the_text() -> None:
    stopped = answer("hi", decoded=DecodedText("hi there"))
    assert judge_text(stopped, stop=" the") == EXACT
    assert judge_text(stopped, stop=" now").grade is Grade.FAULT


def test_a_call_must_be_in_the_ids_in_any_syntax() -> None:
    reply = ParsedReply("", finish_reason="tool_calls", tools=[ToolCall("flag", '{"up": true}')])
    assert judge_text(answer(reply=reply, decoded=DecodedText("[flag(up=True)]"))) == EXACT
    finding = judge_text(answer(reply=reply, decoded=DecodedText('<tool_call>{"name": "flag"}')))
    assert "'up' is not in" in finding.what


def test_reasoning_must_be_in_the_ids() -> None:
    reply = ParsedReply("Yes.", reasoning="Hm", finish_reason="stop")
    assert judge_text(answer(reply=reply, decoded=DecodedText("<think>Hm</think>Yes."))) == EXACT
    assert judge_text(answer(reply=reply, decoded=DecodedText("Yes."))).grade is Grade.FAULT


def test_the_only_text_that_the_grammar_allows_is_required() -> None:
    assert "the grammar allows one text" in judge_text(answer("hi"), expected="ho").what


def test_a_text_that_cannot_be_decoded_is_unknown() -> None:
    untold = ExaminedAnswer((ParsedReply("hi"),), (step([1]),), (None,))
    assert judge_text(untold).grade is Grade.UNKNOWN
    assert "--tokenizer-path" in judge_text(untold).remedy


def test_an_equal_stream_is_exact_and_a_different_one_a_fault() -> None:
    assert judge_stream(answer(), answer(), None) == EXACT
    finding = judge_stream(answer("abc"), answer("abd"), answer("abc"))
    assert (finding.grade, "responses differ at token 2" in finding.what) == (Grade.FAULT, True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            answer(response_logprobs=logprobs_array([-0.5, -3.0])),
            "are 1.2 apart on average, 2.5 at most",
        ),
        (answer(prompt=[1, 3]), "prompts differ at token 1"),
        (answer(reply=ParsedReply(" hi", finish_reason="stop")), "texts differ"),
        (answer(reply=ParsedReply("hi", tools=[ToolCall("h", "{}")])), "tool calls differ"),
    ],
)
def test_the_difference_of_a_stream_is_named(other: ExaminedAnswer, words: str) -> None:
    assert words in judge_stream(answer(), other, answer()).what


def test_an_engine_without_repeatable_answers_leaves_the_stream_unknown() -> None:
    assert judge_stream(answer("abc"), answer("abd"), answer("abe")).grade is Grade.UNKNOWN


def test_an_inconsistent_stream_is_a_fault_for_any_whole_answer() -> None:
    cut = answer(quarantine="response_count: 1 response ids, but usage says 2", response_logprobs=None)
    assert "usage says" in judge_stream(ExaminedAnswer(failure="x"), cut, None).what


def test_a_prefix_is_kept_or_breaks_at_a_token() -> None:
    first = step([5, 6, 7])
    assert judge_prefix(first, step([1], prompt=[1, 2, 5, 6, 7, 8]), ("", "")) == EXACT
    broken = step([1], prompt=[1, 2, 5, 9, 7])
    assert prefix_break(first, broken) == 3
    finding = judge_prefix(first, broken, ("six seven", "nine seven"))
    assert "token 1 of its response: 'six seven' became 'nine seven'" in finding.what
    assert prefix_break(first, step([1], prompt=[1, 2, 5])) == 3
    assert "token 1 of its prompt" in judge_prefix(first, step([1], prompt=[1, 9, 5, 6, 7]), ("a", "b")).what


@pytest.mark.parametrize(
    ("gaps", "grade"),
    [
        ([0.0, 1e-4], Grade.EXACT),
        ([0.0, 0.02], Grade.WARNING),
        ([0.2, 0.2], Grade.FAULT),
        ([0.0] * 99 + [2], Grade.FAULT),
    ],
)
def test_gaps_are_exact_or_of_half_precision_or_too_large(gaps: list[float], grade: Grade) -> None:
    assert judge_gaps(gaps).grade is grade


def test_an_engine_that_does_not_rescore_is_unknown() -> None:
    assert judge_rescored(answer(), ["404"]) == Finding(Grade.UNKNOWN, "the engine does not rescore: 404")


def test_equal_log_probabilities_at_another_temperature_are_raw() -> None:
    assert judge_mode(answer(), [[-0.5, -0.5]]).what.startswith("raw")
    assert judge_mode(answer(), [[-0.7, -0.4]]).what.startswith("processed")
    assert judge_mode(ExaminedAnswer(failure="x"), []).grade is Grade.UNKNOWN


def test_a_dialects_answer_is_exact_if_it_is_that_of_chat() -> None:
    chat = answer("hi")
    assert judge_as_chat(chat, None, answer("hi")) == EXACT
    other_prompt = judge_as_chat(chat, chat, answer("hi", prompt=[1, 3]))
    assert other_prompt.what == "its prompt differs from that of the same chat at token 1"
    other_answer = judge_as_chat(chat, chat, answer("ho"))
    assert "responses differ at token 1" in other_answer.what
    assert judge_as_chat(chat, answer("ha"), answer("ho")) == EXACT, "the engine does not repeat chat's answer either"


def test_thoughts_are_part_of_an_answer() -> None:
    thoughts = [ParsedReply("hi", thought, "stop") for thought in ("hm", "so")]
    one, other = (answer("hi", reply=reply, decoded=DecodedText("<hmso>hi")) for reply in thoughts)
    assert "thoughts differ" in judge_stream(one, other, one).what


def test_a_bridged_turn_begins_with_the_first() -> None:
    first = step([3, 4])
    assert judge_bridge(first, step([9], prompt=[1, 2, 3, 4, 5], prompt_made="bridged")) == EXACT
    lost = judge_bridge(first, step([9], prompt=[1, 2, 3, 7], prompt_made="bridged"))
    assert (lost.grade, "at token 3" in lost.what) == (Grade.FAULT, True)


@pytest.mark.parametrize("outcome", BridgeOutcome)
def test_a_turn_that_is_not_bridged_is_a_warning_with_what_to_do(outcome: BridgeOutcome) -> None:
    if outcome is not BridgeOutcome.BRIDGED:
        finding = judge_bridge(step([3]), step([9], prompt_made=f"rendered: {outcome}"))
        assert (finding.grade, bool(finding.remedy)) == (Grade.WARNING, True)
        assert finding.what.endswith(outcome)
