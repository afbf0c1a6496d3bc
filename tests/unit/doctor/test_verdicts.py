"""What makes a cell exact, and in which words it is not."""

from typing import Any

import pytest

from stepwell.doctor.answer import Answer
from stepwell.doctor.detokenizer import Spelled
from stepwell.doctor.findings import EXACT, NOTHING, Finding, Mark
from stepwell.doctor.replies import Heard, ToolCall
from stepwell.doctor.verdicts import (
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


def answer(text: str = "hi", *, spelled: Spelled | None = None, heard: Heard | None = None, **fields: Any) -> Answer:
    told = heard or Heard(text, finish_reason="stop")
    return Answer((told,), (step(list(text.encode()), **fields),), (spelled or Spelled(text),))


def test_a_step_of_the_engines_own_is_exact() -> None:
    assert judge_ids(answer()) == judge_logprobs(answer()) == judge_text(answer()) == EXACT


def test_a_quarantine_is_told_in_the_column_it_speaks_of_and_in_no_other() -> None:
    of_ids = answer(quarantine="no_response_ids: none", response_logprobs=None)
    of_logprobs = answer(quarantine="bad_logprob: NaN", response_logprobs=None)
    assert (judge_ids(of_ids).mark, judge_logprobs(of_ids)) == (Mark.FAULT, NOTHING)
    assert (judge_ids(of_logprobs), judge_logprobs(of_logprobs).mark) == (EXACT, Mark.FAULT)


def test_a_call_that_failed_is_the_fault_of_its_ids() -> None:
    failed = Answer(failure="no engine answers")
    assert judge_ids(failed).what == "no engine answers"
    assert judge_logprobs(failed) == judge_text(failed) == judge_rescored(failed, []) == NOTHING


def test_a_choice_without_a_step_is_a_fault() -> None:
    lost = Answer((Heard("a"), Heard("b")), (step([1]),), (None,))
    assert judge_ids(lost).what == "1 steps recorded of 2 choices"


def test_ids_from_text_are_not_exact() -> None:
    assert "encoded again" in judge_ids(answer(exactness=Exactness.RETOKENIZED)).what


@pytest.mark.parametrize(
    ("said", "spelled", "finish"),
    [
        ("hi", Spelled("hi<end>", "<end>"), "stop"),
        ("hi", Spelled(" hi"), "stop"),
        ("a\ufffd", Spelled("a\ufffd\ufffd"), "length"),
        ("a", Spelled("a\ufffd<end>", "<end>"), "stop"),
        ("a\ufffdb", Spelled("a\ufffd\ufffd<|x|>b", "b", "a\ufffd\ufffdb"), "length"),
    ],
)
def test_what_is_no_difference_of_tokens_is_exact(said: str, spelled: Spelled, finish: str) -> None:
    assert judge_text(answer(said, spelled=spelled, heard=Heard(said, finish_reason=finish))) == EXACT


@pytest.mark.parametrize(
    ("said", "spelled", "finish"),
    [
        ("hi", Spelled("ho"), "stop"),
        ("hi", Spelled("hi there"), "stop"),
        ("hi", Spelled("hi<end>", "<end>"), "length"),
        ("a\ufffdb", Spelled("a\ufffdc"), "stop"),
    ],
)
def test_a_text_that_the_ids_do_not_spell_is_a_fault(said: str, spelled: Spelled, finish: str) -> None:
    finding = judge_text(answer(said, spelled=spelled, heard=Heard(said, finish_reason=finish)))
    assert finding.mark is Mark.FAULT
    assert "the ids do not spell the text: at character" in finding.what


def test_a_stop_string_is_in_the_ids_and_not_in_the_text() -> None:
    stopped = answer("hi", spelled=Spelled("hi there"))
    assert judge_text(stopped, stop=" the") == EXACT
    assert judge_text(stopped, stop=" now").mark is Mark.FAULT


def test_a_call_must_be_in_the_ids_in_whatever_syntax() -> None:
    heard = Heard("", finish_reason="tool_calls", tools=[ToolCall("flag", '{"up": true}')])
    assert judge_text(answer(heard=heard, spelled=Spelled("[flag(up=True)]"))) == EXACT
    finding = judge_text(answer(heard=heard, spelled=Spelled('<tool_call>{"name": "flag"}')))
    assert "'up' is not in" in finding.what


def test_thinking_must_be_in_the_ids() -> None:
    heard = Heard("Yes.", reasoning="Hm", finish_reason="stop")
    assert judge_text(answer(heard=heard, spelled=Spelled("<think>Hm</think>Yes."))) == EXACT
    assert judge_text(answer(heard=heard, spelled=Spelled("Yes."))).mark is Mark.FAULT


def test_the_only_text_it_could_be_must_be_told() -> None:
    assert "held to one text" in judge_text(answer("hi"), expected="ho").what


def test_a_text_that_no_one_spells_is_untold() -> None:
    untold = Answer((Heard("hi"),), (step([1]),), (None,))
    assert judge_text(untold).mark is Mark.UNTOLD
    assert "--tokenizer-path" in judge_text(untold).remedy


def test_a_stream_that_is_the_same_is_exact_and_another_a_fault() -> None:
    assert judge_stream(answer(), answer(), None) == EXACT
    finding = judge_stream(answer("abc"), answer("abd"), answer("abc"))
    assert (finding.mark, "tokens differ from the 3. on" in finding.what) == (Mark.FAULT, True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            answer(response_logprobs=logprobs_array([-0.5, -3.0])),
            "are 1.2 apart on average, 2.5 at most",
        ),
        (answer(prompt=[1, 3]), "prompts differ at token 1"),
        (answer(heard=Heard(" hi", finish_reason="stop")), "texts differ"),
        (answer(heard=Heard("hi", tools=[ToolCall("h", "{}")])), "tool calls differ"),
    ],
)
def test_what_a_stream_differs_in_is_said(other: Answer, words: str) -> None:
    assert words in judge_stream(answer(), other, answer()).what


def test_an_engine_that_does_not_repeat_itself_leaves_the_stream_untold() -> None:
    assert judge_stream(answer("abc"), answer("abd"), answer("abe")).mark is Mark.UNTOLD


def test_a_stream_that_does_not_add_up_by_itself_is_a_fault_whatever_the_whole_answer_is() -> None:
    cut = answer(quarantine="response_count: 1 response ids, but usage says 2", response_logprobs=None)
    assert "usage says" in judge_stream(Answer(failure="x"), cut, None).what


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
    ("gaps", "mark"),
    [([0.0, 1e-4], Mark.EXACT), ([0.0, 0.02], Mark.WARNING), ([0.2, 0.2], Mark.FAULT), ([0.0] * 99 + [2], Mark.FAULT)],
)
def test_gaps_are_exact_or_of_half_precision_or_too_large(gaps: list[float], mark: Mark) -> None:
    assert judge_gaps(gaps).mark is mark


def test_an_engine_that_does_not_rescore_is_said_to() -> None:
    assert judge_rescored(answer(), ["404"]) == Finding(Mark.UNTOLD, "the engine does not rescore: 404")


def test_equal_log_probabilities_at_another_temperature_are_raw_ones() -> None:
    assert judge_mode(answer(), [[-0.5, -0.5]]).what.startswith("raw")
    assert judge_mode(answer(), [[-0.7, -0.4]]).what.startswith("processed")
    assert judge_mode(Answer(failure="x"), []).mark is Mark.UNTOLD
