"""What a DataProto is made of; with verl itself it is tested in tests/e2e/test_verl.py."""

from typing import Any

import numpy as np
import pytest

from stepwell.errors import BadRequest
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step
from stepwell.trainers.settings import RowSettings
from stepwell.trainers.verl import VerlRows, verl_rows
from tests.unit.trainers.models import one_turn

PAD = 99


def batch_of(*groups: list[Step]) -> Batch:
    return make_batch(pack([step for group in groups for step in group]), [len(group) for group in groups])


def rows_of(batch: Batch, **changes: Any) -> VerlRows:
    given: dict[str, Any] = {"prompt_length": 6, "response_length": 6, "pad_id": PAD}
    settings = RowSettings(temperature=1.0)
    return verl_rows(batch, settings, **{**given, "merged": False, "overlong": "raise", **changes})


def two_turns(uid: str, reward: float | None) -> list[Step]:
    """The second prompt continues the first answer."""
    first = one_turn(uid, "p", [1, 2], [3, 4], step_index=0, policy_version=7)
    return [first, one_turn(uid, "p", [1, 2, 3, 4, 5], [6], step_index=1, policy_version=8, reward=reward)]


def test_prompts_stand_on_the_left_and_responses_on_the_right() -> None:
    tensors = rows_of(batch_of([one_turn("a", "p", [1, 2], [3, 4, 5], reward=1.0)])).tensors

    assert tensors["prompts"].tolist() == [[PAD] * 4 + [1, 2]]
    assert tensors["responses"].tolist() == [[3, 4, 5] + [PAD] * 3]
    assert tensors["input_ids"].tolist() == [[PAD] * 4 + [1, 2, 3, 4, 5] + [PAD] * 3]
    assert tensors["attention_mask"].tolist() == [[0] * 4 + [1] * 5 + [0] * 3]
    assert tensors["position_ids"].tolist() == [[0] * 4 + [0, 1, 2, 3, 4] + [4] * 3]
    assert tensors["response_mask"].tolist() == [[1, 1, 1, 0, 0, 0]]
    assert tensors["token_level_scores"].tolist() == [[0, 0, 1, 0, 0, 0]]
    assert tensors["rollout_log_probs"].tolist() == [[-2, -2, -2, 0, 0, 0]]


def test_every_row_of_a_rollout_carries_its_return_and_its_advantage() -> None:
    rows = rows_of(batch_of([*two_turns("a", 1.0), *two_turns("b", 0.0)]))

    assert rows.tensors["token_level_rewards"].sum(1).tolist() == [1, 1, 0, 0]
    of_rollouts = rows.tensors["advantages"].max(1) + rows.tensors["advantages"].min(1)
    np.testing.assert_allclose(of_rollouts, np.array([1, 1, -1, -1]) * np.sqrt(0.5), rtol=1e-3)
    assert (rows.tensors["advantages"][rows.tensors["response_mask"] == 0] == 0).all()


def test_merged_a_rollout_is_one_row_in_which_only_the_models_tokens_are_trained() -> None:
    rows = rows_of(batch_of([*two_turns("a", 1.0), *two_turns("b", 0.0)]), merged=True)

    assert rows.tensors["prompts"].tolist() == [[PAD] * 4 + [1, 2]] * 2
    assert rows.tensors["responses"].tolist() == [[3, 4, 5, 6, PAD, PAD]] * 2
    assert rows.tensors["response_mask"].tolist() == [[1, 1, 0, 1, 0, 0]] * 2
    assert rows.tensors["rollout_log_probs"].tolist() == [[-2, -2, 0, -2, 0, 0]] * 2
    assert rows.tensors["token_level_scores"].tolist() == [[0, 0, 0, 1, 0, 0], [0] * 6]
    assert rows.labels["trajectory_uid"].tolist() == ["a", "b"]
    assert rows.labels["policy_version"].tolist() == [7, 7]


def test_a_prompt_that_comes_again_is_another_group() -> None:
    first = [one_turn(uid, "p", [1], [2], reward=1.0) for uid in "ab"]
    second = [one_turn(uid, "p", [1], [2], reward=0.0) for uid in "cd"]

    rows = rows_of(batch_of(first, second))

    assert rows.labels["uid"].tolist() == ["a", "a", "c", "c"]
    assert rows.labels["prompt_uid"].tolist() == ["p"] * 4
    assert not rows.tensors["advantages"].any(), "two groups, in each of which all earned the same"


def test_a_rollout_that_no_one_has_scored_is_left_out_and_counted() -> None:
    rewards = {"a": 1.0, "b": None, "c": 0.0}
    rows = rows_of(batch_of([one_turn(uid, "p", [1], [2], reward=reward) for uid, reward in rewards.items()]))

    assert rows.labels["trajectory_uid"].tolist() == ["a", "c"]
    assert rows.unscored == 1


def test_a_batch_without_a_score_is_refused() -> None:
    with pytest.raises(BadRequest, match="no rollout of this batch is scored"):
        rows_of(batch_of([one_turn("a", "p", [1], [2])]))


@pytest.mark.parametrize("merged", [False, True])
def test_log_probabilities_are_there_for_all_rows_or_for_none(merged: bool) -> None:
    told = one_turn("a", "p", [1], [2], reward=1.0)
    untold = one_turn("b", "p", [1], [2], reward=0.0, response_logprobs=None)

    assert "rollout_log_probs" in rows_of(batch_of([told]), merged=merged).tensors
    rows = rows_of(batch_of([told, untold]), merged=merged)
    assert "rollout_log_probs" not in rows.tensors
    assert rows.rows_without_logprobs == 1, "nothing says why verl computes its own"


def test_what_is_too_long_is_refused_or_left_out_but_never_cut() -> None:
    batch = batch_of([one_turn("a", "p", [1] * 7, [2], reward=1.0), one_turn("b", "p", [1], [2], reward=0.0)])

    with pytest.raises(BadRequest, match="the longest has 7"):
        rows_of(batch)
    rows = rows_of(batch, overlong="drop")
    assert rows.labels["trajectory_uid"].tolist() == ["b"]
    assert rows.rows_too_long == 1
    np.testing.assert_allclose(rows.tensors["advantages"][0, 0], -np.sqrt(0.5), rtol=1e-3)
