"""Examples to imitate, and pairs to prefer by."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stepwell.exports.preferences import PreferenceShape
from stepwell.exports.sft import IGNORED, SftShape
from stepwell.steps.groups import StepGroup
from stepwell.steps.step import Step, mask_array
from tests.builders import make_step
from tests.rig.vocabulary import encode
from tests.unit.exports.stored import stored, turns


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def rows(shape: SftShape | PreferenceShape, *groups: StepGroup) -> list[dict[str, Any]]:
    """As a table has them; lines have the same."""
    found: list[dict[str, Any]] = shape.table(groups).to_pylist()
    plain = [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.items()}
        for record in shape.records(groups)
    ]
    assert plain == found
    return found


def answer(uid: str, reward: float | None, text: str = "4", prompt: str = "2+2=", **fields: Any) -> list[Step]:
    ids = {"prompt_ids": encode(prompt), "response_ids": encode(text)}
    return [make_step(uid, "p", step_index=0, reward=reward, **{**ids, **fields})]


# -- to imitate --------------------------------------------------------------------------------------------------------


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


# -- to prefer by ------------------------------------------------------------------------------------------------------


def test_a_pair_has_the_names_that_trainers_read() -> None:
    (row,) = rows(PreferenceShape(decode, 0.0), stored(answer("a", 0.0, "5"), answer("b", 1.0, "4")))
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("2+2=", "4", "5")
    assert (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) == (encode("2+2="), encode("4"), encode("5"))
    assert (row["chosen_uid"], row["rejected_uid"]) == ("b", "a")
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.0)


def test_the_best_is_paired_with_the_worst_and_each_is_in_one_pair() -> None:
    group = stored(*(answer(uid, reward) for uid, reward in zip("abcde", (3.0, 1.0, 5.0, 4.0, 2.0), strict=True)))
    found = rows(PreferenceShape(None, 0.0), group)
    assert [(row["chosen_uid"], row["rejected_uid"]) for row in found] == [("c", "b"), ("d", "e")]


@pytest.mark.parametrize(
    ("margin", "count"),
    [(0.0, 1), (0.5, 1), (0.6, 0)],
)
def test_a_pair_differs_by_the_margin_at_least(margin: float, count: int) -> None:
    assert len(rows(PreferenceShape(None, margin), stored(answer("a", 1.0), answer("b", 0.5)))) == count


def test_equal_rewards_are_no_pair_nor_is_what_no_one_scored() -> None:
    assert rows(PreferenceShape(None, 0.0), stored(answer("a", 1.0), answer("b", 1.0), answer("c", None))) == []


def test_answers_to_different_prompts_are_no_pair() -> None:
    group = stored(answer("a", 1.0), answer("b", 0.0, prompt="2+2 ="), answer("c", 0.5))
    found = rows(PreferenceShape(None, 0.0), group)
    assert [(row["chosen_uid"], row["rejected_uid"]) for row in found] == [("a", "c")]


def test_what_follows_the_first_prompt_is_the_answer_also_over_many_turns() -> None:
    talk = [
        *answer("a", None, "6*7", prompt="q"),
        make_step("a", "p", step_index=1, prompt_ids=encode("q6*7 tool:42 "), response_ids=encode("42"), reward=1.0),
    ]
    (row,) = rows(PreferenceShape(decode, 0.0), stored(talk, answer("b", 0.0, "41", prompt="q")))
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("q", "6*7 tool:42 42", "41")


def test_a_rollout_that_does_not_continue_its_first_prompt_is_passed_over() -> None:
    compacted = [*answer("a", None), make_step("a", "p", step_index=1, prompt_ids=encode("summary"), reward=1.0)]
    assert rows(PreferenceShape(None, 0.0), stored(compacted, answer("b", 0.0))) == []


def test_a_table_without_rows_still_has_its_columns() -> None:
    table = PreferenceShape(decode, 0.0).table([stored(answer("a", 1.0))])
    assert len(table) == 0
    assert table.schema.field("chosen").type == pa.string()
    assert table.schema.field("chosen_ids").type == pa.list_(pa.int32())
