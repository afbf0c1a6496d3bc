import pyarrow as pa
import pytest

from rig.builders import make_step
from rig.vocabulary import encode
from stepwell.exports.shapes import PreferenceShape
from tests.unit.exports.shaped import answer, decode, rows
from tests.unit.exports.stored import stored


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
