"""RLOO for steps: each is compared with the mean of the others at its place, however many reached it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.steps.advantages import AdvantageKind, BaselineInputs, baseline_advantages, compare_steps

REWARDS = st.sampled_from([0.0, 0.25, 1.0])
ROLLOUT = st.tuples(REWARDS, st.lists(REWARDS, max_size=4))
"""Its outcome, and the rewards of its steps."""


def compared_steps(kind: AdvantageKind, rollouts: list[tuple[float, list[float]]], size: int) -> BaselineInputs:
    outcomes = np.array([outcome for outcome, _ in rollouts], np.float64)
    rewards = [np.array(of_steps, np.float64) for _, of_steps in rollouts]
    counts = [len(of_steps) for of_steps in rewards]
    return compare_steps(
        kind,
        outcomes + np.array([of_steps.sum() for of_steps in rewards]),
        outcomes,
        np.concatenate(rewards),
        np.repeat(np.arange(len(rollouts)), counts),
        np.arange(len(rollouts)) // size,
        np.concatenate([np.arange(count) for count in counts]),
    )


def minus_mean_of_others(value: float, others: list[float]) -> float:
    return value - float(np.mean(others)) if others else 0.0


@given(st.sampled_from(["step", "reward_to_go"]), st.lists(ROLLOUT, min_size=1, max_size=7), st.integers(2, 4))
def test_it_is_the_value_minus_the_mean_of_the_others(
    kind: AdvantageKind, rollouts: list[tuple[float, list[float]]], size: int
) -> None:
    advantages = iter(
        baseline_advantages(compared_steps(kind, rollouts, size), "leave_one_out", "none", divide_by_std=False)
    )

    def counted(n: int, place: int) -> float:
        rewards = rollouts[n][1]
        return rewards[place] if kind == "step" else sum(rewards[place:])

    for n, (outcome, rewards) in enumerate(rollouts):
        others = [other for other in range(len(rollouts)) if other // size == n // size and other != n]
        of_rollout = minus_mean_of_others(outcome, [rollouts[other][0] for other in others])
        for place in range(len(rewards)):
            there = [counted(other, place) for other in others if place < len(rollouts[other][1])]
            expected = of_rollout + minus_mean_of_others(counted(n, place), there)
            assert next(advantages) == pytest.approx(expected, abs=1e-7)


def test_a_place_that_two_of_four_reach_is_compared_between_the_two() -> None:
    rollouts = [(0.0, [0.0, 1.0]), (0.0, [0.0, 0.0]), (0.0, [0.0]), (0.0, [0.0])]
    computed = baseline_advantages(compared_steps("step", rollouts, 4), "leave_one_out", "none", divide_by_std=False)
    assert computed.tolist() == [0, 1, 0, -1, 0, 0], "it was 2/3, the factor of a group of four"
