"""How generated answers were sampled, for steps that do not tell it."""

from stepwell.gateway.generated_answers import AnswerSampling, GeneratedAnswers
from stepwell.steps.step import ids_array
from tests.builders import make_step

WARM, COLD = AnswerSampling(1.0, None), AnswerSampling(0.5, None)
STEP = make_step("t", prompt_ids=[1, 2], response_ids=[3], temperature=None, sampling={})


def test_a_step_is_recognised_by_its_tokens() -> None:
    answers = GeneratedAnswers()
    answers.note([1, 2], ids_array([3]), COLD)
    assert answers.complete(STEP).temperature == 0.5
    moved = make_step("t", prompt_ids=[1], response_ids=[2, 3], temperature=None, sampling={})
    assert answers.complete(moved) is moved, "the same tokens, divided otherwise"


def test_tokens_that_were_sampled_in_two_ways_tell_nothing() -> None:
    answers = GeneratedAnswers()
    for sampled in (WARM, COLD, WARM):
        answers.note([1, 2], ids_array([3]), sampled)
    assert answers.complete(STEP) is STEP


def test_the_oldest_answers_are_forgotten() -> None:
    answers = GeneratedAnswers(most=2)
    for last in (3, 4, 5):
        answers.note([1, 2], ids_array([last]), WARM)
    assert answers.complete(STEP) is STEP
    newest = make_step("t", prompt_ids=[1, 2], response_ids=[5], temperature=None, sampling={})
    assert answers.complete(newest).temperature == 1.0
