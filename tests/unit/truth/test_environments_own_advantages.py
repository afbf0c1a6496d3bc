"""T11: advantages and overrides that an environment sends are used; every trainer computed its own instead."""

from typing import Any

import pytest
from stepwell.trainers.trl_groups import PolicyVersions

from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings
from stepwell.trainers.trl import samples_of
from stepwell.trainers.verl import VerlRows, verl_rows
from tests.unit.trainers.models import one_turn


def batch_of(first: dict[str, Any], second: dict[str, Any], rewards: tuple[float, float] = (1.0, 0.0)) -> Batch:
    """Two rollouts of two tokens of prompt and two of response, with these extras."""
    steps = [
        one_turn(f"t{n}", "p", [1, 2], [3, 4 + n], reward=reward, extras=extras)
        for n, (reward, extras) in enumerate(zip(rewards, (first, second), strict=True))
    ]
    return make_batch(pack(steps), [2])


def trained(batch: Batch) -> list[float]:
    (whole,) = choose_rows(batch, ()).passes(1000)
    return [float(value) for value in whole.advantages_N.round(3).tolist()]


def test_an_environments_advantages_take_the_place_of_ours() -> None:
    """They are one for each token of the sequence, prompt and response."""
    batch = batch_of({"advantages": [0.0, 0.0, 0.25, -0.5]}, {"advantages": [0.0, 0.0, 2.0, 3.0]})
    assert trained(batch) == [0.25, -0.5, 2.0, 3.0]


def test_they_teach_also_if_all_scores_are_equal() -> None:
    batch = batch_of({"advantages": [0.0, 0.0, 1.0, 1.0]}, {"advantages": [0.0, 0.0, -1.0, -1.0]}, (1.0, 1.0))
    assert trained(batch) == [1.0, 1.0, -1.0, -1.0]


def test_a_sequence_whose_override_says_so_has_advantage_0() -> None:
    first, _, third, _ = trained(batch_of({"overrides": {"set_advantage_to_zero": True}}, {"overrides": {}}))
    assert first == 0.0
    assert third == pytest.approx(-(0.5**0.5), abs=1e-3)


@pytest.mark.parametrize(
    "own",
    [[0.5], [0.5, 0.5, 0.5], 0.5, "0.5", [0.0, 0.0, 0.5, None], [0.0, 0.0, 0.5, float("nan")], [0, 0, "x", [1]]],
    ids=["too short", "neither sequence nor response", "one number", "text", "null", "nan", "no numbers"],
)
def test_a_step_whose_advantages_cannot_be_used_is_left_out_and_counted(own: object) -> None:
    """Computed ones must not stand in for them."""
    batch = batch_of({"advantages": own}, {"advantages": [2.0, 3.0]})
    rows = choose_rows(batch, ())
    assert rows.left_out.steps_unusable_advantages == 1
    assert trained(batch) == [2.0, 3.0]
    verl = verl_rows_of(batch)
    assert verl.tensors["response_mask"].tolist() == [[1, 1]]
    assert verl.tensors["advantages"].tolist() == [[2.0, 3.0]]
    assert verl.steps_left_out == 1


def verl_rows_of(batch: Batch) -> VerlRows:
    return verl_rows(
        batch,
        RowSettings(temperature=1.0),
        prompt_length=2,
        response_length=2,
        pad_id=0,
        merged=False,
        overlong="raise",
    )


def test_trl_and_verl_get_them_too() -> None:
    batch = batch_of({"advantages": [0.0, 0.0, 0.25, 0.25]}, {"advantages": [0.0, 0.0, 2.0, 2.0]})

    assert [sample.advantage for sample in samples_of(choose_rows(batch, ()), 0, PolicyVersions())] == [0.25, 2.0]
    assert verl_rows_of(batch).tensors["advantages"].tolist() == [[0.25, 0.25], [2.0, 2.0]]
