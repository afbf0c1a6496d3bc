"""Kin of T3: the 1.0 that environments send as the log-probability of a token that no policy wrote is no data."""

import numpy as np
import pytest

from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import logprobs_array
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings
from stepwell.trainers.verl import verl_rows
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_steps import columns_from_group
from tests.unit.trainers.models import one_turn


def batch_of(*logprobs: list[float]) -> Batch:
    steps = [
        one_turn(f"t{n}", "p", [1], [2, 3 + n], reward=float(n), response_logprobs=logprobs_array(own))
        for n, own in enumerate(logprobs)
    ]
    return make_batch(pack(steps), [len(steps)])


RECORDED = RowSettings(old_logprobs="recorded")


def test_a_rollout_that_trains_such_a_token_is_left_out_and_counted_where_none_is_computed() -> None:
    rows = choose_rows(batch_of([-1.0, -1.0], [-1.0, 1.0], [-2.0, -1.0]), (), RECORDED)
    assert rows.left_out.rollouts_without_logprobs == 1
    (whole,) = rows.passes(1000)
    assert whole.recorded_N.tolist() == [-1.0, -1.0, -2.0, -1.0]


def test_such_a_token_has_no_log_probability_until_one_is_computed() -> None:
    (whole,) = choose_rows(batch_of([-1.0, -1.0], [-1.0, 1.0], [-2.0, -1.0]), ()).passes(1000)
    assert np.isnan(whole.recorded_N).tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("merged", [False, True])
def test_verl_does_not_take_it_for_a_log_probability(merged: bool) -> None:
    settings = RowSettings(temperature=1.0)
    lengths = {"prompt_length": 1, "response_length": 2, "pad_id": 0}
    rows = verl_rows(batch_of([-1.0, -1.0], [-1.0, 1.0]), settings, merged=merged, overlong="raise", **lengths)
    assert "rollout_log_probs" not in rows.tensors
    assert rows.rows_without_logprobs == 1


def test_a_token_between_turns_may_have_it() -> None:
    sent = {
        "tokens": [[1, 2, 9, 3], [1, 4, 9, 5]],
        "masks": [[-100, 2, -100, 3], [-100, 4, -100, 5]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.5, 1.0, -0.5]] * 2,
        "temperatures": [1.0, 1.0],
    }
    columns = columns_from_group(group_from_json(sent), "p", source="", policy_version=0, arrived_at=0.0)
    rows = choose_rows(make_batch(columns, [2]), ())
    assert rows.left_out.rollouts_without_logprobs == 0
    assert rows.tokens == 4
