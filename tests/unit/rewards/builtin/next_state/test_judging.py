"""The built-in `next_state` as a whole: rewards, evidence and abstentions of the steps of a conversation."""

from typing import Any

import pytest

from stepwell.errors import BadRequest
from stepwell.pool.api.scoring import Score
from stepwell.rewards.function import as_score, attempt_of, read_attempt, write_attempt
from stepwell.rewards.loading import load
from stepwell.rewards.sample import Sample
from tests.unit.rewards.builtin.next_state.test_replies import ASSISTANT, USER, call
from tests.unit.rewards.texts import trajectory

TURNS = (
    ("List three fruits", "Apple, plum"),
    ("No, I meant three", "Apple, plum, pear"),
    ("Thanks!", "You are welcome"),
    ("What is the capital of Norway?", "Oslo"),
)


def conversation(*turns: tuple[str, str]) -> Sample:
    """The user's message and the reply of each step."""
    said: list[tuple[str, str]] = []
    steps = []
    for message, reply in turns:
        said.append((USER, message))
        steps.append(call(reply, *said))
        said.append((ASSISTANT, reply))
    return trajectory(*steps)


def scored(sample: Sample, **options: Any) -> Score:
    result: Any = load("next_state", options).call(sample)
    return as_score(result, len(sample.steps))


def test_each_step_is_rewarded_by_what_was_said_next_with_the_evidence() -> None:
    score = scored(conversation(*TURNS))
    assert score.step_rewards == (-1.0, 1.0, None, None)
    assert score.step_details == (
        {"rule": "correction", "speaker": "user", "text": "No, I meant three", "hint": "three"},
        {"rule": "thanks", "speaker": "user", "text": "Thanks!"},
        {"abstained": "no rule fits what was said next"},
        None,
    )
    assert score.parts == {"correction": 1, "thanks": 1, "abstained": 2}
    assert score.value == 0.0
    assert score.outcome is None


def test_without_evidence_it_abstains_which_is_not_zero() -> None:
    assert scored(conversation(TURNS[0])).is_abstention
    assert scored(conversation(TURNS[0], TURNS[3])).is_abstention
    assert not scored(conversation(*TURNS)).is_abstention


def test_options_extend_the_table() -> None:
    sample = conversation(TURNS[0], ("Bzzt", "?"))
    options = {"rules": {"buzzer": {"reward": -0.75, "patterns": ["^bzzt"]}}}
    assert scored(sample).step_rewards == (None, None)
    assert scored(sample, **options).step_rewards == (-0.75, None)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"patterns": ["("]}, "is no regular expression"),
        ({"reward": 3}, "from -1 to 1"),
        ({"gain": 1}, "next_state cannot be made"),
    ],
)
def test_options_that_cannot_work_are_refused(rule: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        load("next_state", {"rules": {"correction": rule}})


def test_evidence_survives_the_way_from_the_child() -> None:
    sample = conversation(*TURNS)
    attempt = attempt_of(load("next_state").call(sample), len(sample.steps), 0.1)
    assert read_attempt(write_attempt(3, attempt, is_leaving=False)) == (3, attempt, False)
