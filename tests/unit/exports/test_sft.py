from rig.builders import make_step
from rig.vocabulary import encode
from stepwell.exports.shapes import IGNORED, SftShape
from stepwell.steps.step import mask_array
from tests.unit.exports.shaped import answer, decode, rows
from tests.unit.exports.stored import stored, turns


def test_an_example_has_its_texts_and_can_be_trained_as_it_is() -> None:
    (row,) = rows(SftShape(decode, None), stored(answer("a", 1.0, policy_version=3), source="maths"))
    assert (row["prompt"], row["completion"], row["reward"]) == ("2+2=", "4", 1.0)
    assert row["input_ids"] == encode("2+2=4")
    assert row["labels"] == [IGNORED] * 4 + encode("4")
    assert (row["trajectory_uid"], row["policy_version"], row["source"], row["channel"]) == ("a", 3, "maths", "train")


def test_a_token_that_is_not_trained_has_no_label() -> None:
    (row,) = rows(SftShape(None, None), stored(answer("a", 1.0, "abc", response_mask=mask_array([1, 0, 1]))))
    assert row["labels"][-3:] == [*encode("a"), IGNORED, *encode("c")]
    assert "prompt" not in row


def test_every_step_is_an_example_with_what_the_rollout_earned_but_side_calls_are_none() -> None:
    steps = turns("a", 3)
    steps[1] = make_step("a", "p", step_index=1, untrainable="side_call: a title", reward=9.0)
    steps[2] = make_step("a", "p", step_index=2, untrainable="greedy: temperature 0", reward=2.0)
    found = rows(SftShape(None, None), stored(steps))
    assert [(row["step_index"], row["reward"]) for row in found] == [(0, 2.0), (2, 2.0)]


def test_of_each_group_the_best_are_taken_and_none_that_no_one_scored() -> None:
    first = stored(answer("a", 0.5), answer("b", 2.0), answer("c", None), answer("d", 1.0))
    second = stored(answer("e", -1.0))
    found = rows(SftShape(None, 2), first, second)
    assert [row["trajectory_uid"] for row in found] == ["b", "d", "e"]
