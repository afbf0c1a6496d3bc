"""The truth benchmark, run for one temperature: the gradients are right, and it notices those that are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.truth import (
    AT_LEAST,
    WITHOUT,
    cosine,
    current_for_old_weights,
    mixed_temperatures,
    of_cases,
    other_credit,
    other_setting,
    temperature_ignored,
    without_logprobs,
    worst_cosines,
)
from benchmarks.truth_rig.episodes import FAR, SCENARIOS, Scenario, Task
from benchmarks.truth_rig.gradients import ours
from benchmarks.truth_rig.other_trainers import by_formula
from benchmarks.truth_rig.sessions import CASES, BaselineCase, Sessions
from stepwell.pool.client.batch import Batch
from stepwell.steps.advantages import BASELINES
from stepwell.trainers.algorithms import AGGREGATIONS, ALGORITHMS
from stepwell.trainers.settings import Settings


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.name != FAR], ids=lambda scenario: scenario.name)
def test_every_trainer_gets_the_policy_gradient(scenario: Scenario) -> None:
    """TRL and verl by their formulas: their own code needs their environments."""
    measured, computed_by = worst_cosines([scenario], [0.5], by_formula)
    assert list(measured) == [f"{trainer}_{scenario.name}" for trainer in computed_by]
    assert list(computed_by) == ["ours", "loader", "trl", "verl", "verl_merged"]
    assert min(measured.values()) >= AT_LEAST


def test_groups_of_different_temperatures_are_trained_together() -> None:
    assert mixed_temperatures() >= AT_LEAST


def test_a_group_stands_for_the_whole_distribution() -> None:
    """Every rollout is in it as often as it is probable."""
    task = Task(SCENARIOS[0], 1.5)
    assert len(task.batch().returns_T) == 4**3
    assert len(task.rollouts) == 3**3


def changed(batch: Batch, **columns: object) -> Batch:
    return replace(batch, columns=replace(batch.columns, **columns))  # type: ignore[arg-type]


def test_wrong_log_probabilities_or_rewards_are_noticed() -> None:
    task = Task(SCENARIOS[0], 1.0)
    batch, exact = task.batch(), task.exact_gradient()
    rolled = changed(batch, logprobs=np.roll(batch.columns.logprobs, 1))
    assert cosine(ours(rolled, task.table, Settings()), exact) < AT_LEAST
    one_lost = batch.columns.returns_S.copy()
    one_lost[:8] = 0.0
    assert cosine(ours(changed(batch, returns_S=one_lost), task.table, Settings()), exact) < AT_LEAST


@pytest.mark.parametrize("scenario", WITHOUT)
def test_recomputed_log_probabilities_give_the_gradient_of_recorded_ones(scenario: str) -> None:
    """By the weights that sampled. TRL, verl and a loop with a loader have the current ones, where these sampled."""
    figures = without_logprobs([scenario], [0.5], by_formula)
    assert {f"recomputed_{scenario}", f"recomputed_{scenario}_mixed"} <= figures.keys()
    assert min(figures.values()) >= AT_LEAST


def test_current_log_probabilities_in_place_of_old_ones_are_noticed() -> None:
    assert current_for_old_weights(0.5) < AT_LEAST


def test_a_temperature_that_is_ignored_is_noticed() -> None:
    assert temperature_ignored(0.5) < AT_LEAST


def test_another_credit_for_the_steps_of_a_tree_is_noticed() -> None:
    assert other_credit(0.5) < AT_LEAST


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_baselines_aggregations_algorithms_and_units_give_the_gradient_of_their_definition(case: BaselineCase) -> None:
    assert min(of_cases([case]).values()) >= AT_LEAST


def test_every_baseline_aggregation_and_algorithm_has_a_case() -> None:
    assert {case.settings.baseline for case in CASES} == set(BASELINES)
    assert {case.settings.loss_aggregation for case in CASES} == set(AGGREGATIONS)
    assert {case.settings.algorithm for case in CASES} == set(ALGORITHMS)
    assert {case.settings.unit for case in CASES} == {"groups", "trajectories", "steps"}


def test_another_baseline_or_aggregation_is_noticed() -> None:
    assert other_setting("batch", "none", "group_undivided") < 0.9
    assert other_setting("group", "sequence_mean", "fixed_length") < 0.9


def test_sessions_stand_for_the_whole_distribution() -> None:
    sessions = Sessions()
    assert len(sessions.rollouts) == 2 * 4**3
    assert {len(rollout.tokens) for rollout in sessions.rollouts} == {1, 2, 3}


def test_a_gradient_has_no_entry_where_nothing_was_sampled() -> None:
    task = Task(SCENARIOS[0], 1.0)
    assert int((task.exact_gradient().abs().sum(1) > 0).sum()) == 1 + 3 + 9
    assert torch.equal(task.exact_gradient() != 0, ours(task.batch(), task.table, Settings()).abs() > 1e-9)
