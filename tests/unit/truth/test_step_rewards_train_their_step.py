"""M4: a process reward trains its step: `advantage="step"` and `"reward_to_go"` reach every shipped trainer.

Every trainer took the rollout's sum, so a reward of one step trained all steps alike.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.trainers.trl_groups import PolicyVersions

from stepwell.errors import BadRequest
from stepwell.pool.client.batch import Batch
from stepwell.steps.advantages import AdvantageKind, GroupBaseline, compare_steps
from stepwell.steps.returns import split_rewards
from stepwell.steps.step import Step
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.trl import samples_of
from stepwell.trainers.verl import verl_rows
from tests.unit.trainers.models import Recurrent, one_turn
from tests.unit.trainers.training_pool import TrainingPool

KINDS: tuple[AdvantageKind, ...] = ("rollout", "step", "reward_to_go")


def three_turns(uid: str, *rewards: float | None) -> list[Step]:
    """Each turn continues the one before it with a token of the environment."""
    prompts = ([1], [1, 2, 9], [1, 2, 9, 3, 9])
    turns = [one_turn(uid, "p", prompt, [2 + n], step_index=n) for n, prompt in enumerate(prompts)]
    return [replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True)]


def batch_of(first: list[Step], second: list[Step], outcomes: tuple[float | None, float | None]) -> Batch:
    pool = TrainingPool()
    pool.add_group("p", list(zip((first, second), outcomes, strict=True)))
    return pool.fetch_batch(1)


def middle_differs() -> Batch:
    """Two rollouts that differ in the reward of their second step alone."""
    return batch_of(three_turns("a", 0.5, 1.0, 0.5), three_turns("b", 0.5, 0.0, 0.5), (1.0, 1.0))


def advantages(batch: Batch, kind: AdvantageKind) -> list[list[float]]:
    """Of the trained tokens of each row: one token per step."""
    rows = choose_rows(batch, (), RowSettings(advantage=kind))
    (whole,) = rows.passes(10_000)
    of_rows = [whole.trained_R_L[row].sum() for row in range(len(whole.ids_R_L))]
    parts = np.split(whole.advantages_N.astype(np.float64), np.cumsum(of_rows)[:-1])
    return [part.round(2).tolist() for part in parts]


def test_a_step_reward_counts_for_all_steps_for_its_own_or_for_it_and_those_before() -> None:
    batch = middle_differs()
    better = round(0.5**0.5, 2)

    assert advantages(batch, "rollout") == [[better] * 3, [-better] * 3]
    assert advantages(batch, "step") == [[0.0, better, 0.0], [0.0, -better, 0.0]]
    assert advantages(batch, "reward_to_go") == [[better, better, 0.0], [-better, -better, 0.0]]


def test_the_outcome_reward_counts_for_all_steps() -> None:
    batch = batch_of(three_turns("a", 0.5, 0.5, 0.5), three_turns("b", 0.5, 0.5, 0.5), (1.0, 0.0))
    for kind in KINDS:
        first, second = advantages(batch, kind)
        assert first == [first[0]] * 3
        assert first[0] > 0 > second[0]


def test_a_step_reward_equal_to_the_outcome_reward_is_its_own_though_another_step_is_left_out() -> None:
    rollouts = [three_turns("a", 1.0, 1.0, 1.0), three_turns("b", 1.0, 1.0, 0.0)]
    marked = [[replace(turns[0], untrainable="side_call: told to"), *turns[1:]] for turns in rollouts]
    batch = batch_of(marked[0], marked[1], (1.0, 1.0))
    outcomes_T, rewards_S = split_rewards(batch.columns, batch.trajectory_of_S)
    assert (outcomes_T.tolist(), rewards_S.tolist()) == ([1.0, 1.0], [1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("left_out", [None, "side_call: told to"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_outcome_reward_on_the_last_step_is_none_of_the_steps_own(kind: AdvantageKind, left_out: str | None) -> None:
    """A batch shows it there if the step has no reward. It counts for all steps, whichever are left out."""
    rollouts = [three_turns("a", 0.5, None, None), three_turns("b", 0.5, None, None)]
    marked = [[replace(turns[0], untrainable=left_out), *turns[1:]] for turns in rollouts]
    first, second = advantages(batch_of(marked[0], marked[1], (1.0, 0.0)), kind)
    assert first == [0.71] * len(first)
    assert second == [-0.71] * len(second)


def test_the_reward_of_a_step_that_is_left_out_counts_for_no_other_step_of_kind_step() -> None:
    rollouts = [three_turns("a", 1.0, 0.5, 0.2), three_turns("b", 0.0, 0.5, 0.1)]
    marked = [[replace(turns[0], untrainable="side_call: told to"), *turns[1:]] for turns in rollouts]
    (second, third), _ = advantages(batch_of(marked[0], marked[1], (0.0, 0.0)), "step")
    assert second == 0.0
    assert third > 0.0


def test_step_rewards_teach_also_if_all_returns_are_equal() -> None:
    batch = batch_of(three_turns("a", 1.0, 0.0, 0.0), three_turns("b", 0.0, 0.0, 1.0), (0.0, 0.0))
    assert choose_rows(batch, ()).tokens == 0
    first, second = advantages(batch, "step")
    assert first[0] > 0 == first[1] > first[2]
    assert second == [-value for value in first]


def test_a_trainer_learns_a_step_from_its_reward() -> None:
    pool = TrainingPool()
    pool.add_group("p", [(three_turns("a", 0.0, 1.0, 0.0), 0.0), (three_turns("b", 0.0, 0.0, 1.0), 0.0)])
    settings = Settings(groups=1, updates=1, advantage="step")
    assert AsyncTrainer(pool, Recurrent(), settings=settings).step().gradient_norm > 0


def test_a_loader_gives_each_token_its_advantage() -> None:
    pool = TrainingPool()
    pool.add_group("p", [(three_turns("a", 0.5, 1.0, 0.5), 1.0), (three_turns("b", 0.5, 0.0, 0.5), 1.0)])
    (batch,) = pool_loader(pool, 1, batches=1, rows=RowSettings(advantage="step"))
    first = batch["advantages"][0][batch["trained"][0]].tolist()
    assert first == [0.0, pytest.approx(0.5**0.5, abs=1e-3), 0.0]


def test_trl_gets_a_sample_for_each_advantage_of_a_row() -> None:
    samples = samples_of(choose_rows(middle_differs(), (), RowSettings(advantage="step")), 0, PolicyVersions())

    trained = [(sample.advantage > 0, sample.completion_mask.tolist()) for sample in samples if sample.advantage]
    assert trained == [(True, [0, 0, 0, 1]), (False, [0, 0, 0, 1])]
    assert sum(sample.completion_mask.sum() for sample in samples) == 6


@pytest.mark.parametrize("merged", [False, True])
def test_verl_gets_the_advantage_of_each_token(merged: bool) -> None:
    rows = verl_rows(
        middle_differs(),
        RowSettings(advantage="step", temperature=1.0),
        prompt_length=5,
        response_length=6,
        pad_id=0,
        merged=merged,
        overlong="raise",
    )
    of_tokens = rows.tensors["advantages"][rows.tensors["response_mask"] == 1]
    better = pytest.approx(0.5**0.5, abs=1e-3)
    assert of_tokens.tolist() == [0.0, better, 0.0, 0.0, pytest.approx(-(0.5**0.5), abs=1e-3), 0.0]


def test_another_kind_is_refused() -> None:
    with pytest.raises(BadRequest, match="advantage is one of rollout, step, reward_to_go, not 'steps'"):
        choose_rows(middle_differs(), (), RowSettings(advantage="steps"))  # type: ignore[arg-type]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=5), min_size=1, max_size=6))
def test_without_step_rewards_all_kinds_are_the_same(made: list[list[float]]) -> None:
    """The lists are rollouts; their first number is the outcome, their length the number of steps."""
    trajectory_of_S = np.repeat(np.arange(len(made)), [len(steps) for steps in made])
    places_S = np.concatenate([np.arange(len(steps)) for steps in made])
    returns_T = np.array([steps[0] for steps in made])
    none_S = np.zeros(len(trajectory_of_S))
    group_of_T = np.zeros(len(made), np.int64)
    of_rollouts, *others = (
        GroupBaseline()
        .differences(compare_steps(kind, returns_T, returns_T, none_S, trajectory_of_S, group_of_T, places_S))
        .divided(by_std=True)
        for kind in KINDS
    )
    for computed in others:
        np.testing.assert_allclose(computed, of_rollouts, atol=1e-12)
