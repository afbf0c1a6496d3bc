import math

import numpy as np
import pytest

from stepwell.steps.advantages import MAX_KEYS, MEMORY, NO_PAST, RunningStatistics, statistics_of


def after(past: RunningStatistics, rewards: list[float], keys: list[str] | None = None) -> RunningStatistics:
    count = len(rewards)
    return past.after(
        np.array(rewards), np.zeros(count), np.arange(count), keys or [""] * count, np.ones(count, np.bool_)
    )


def test_the_first_rewards_are_not_pulled_towards_0() -> None:
    first = after(NO_PAST, [1.0, 3.0]).of_all
    assert (first.common, first.variance) == pytest.approx((2.0, 1.0))
    second = after(after(NO_PAST, [2.0]), [2.0]).of_all
    assert (second.common, second.variance) == pytest.approx((2.0, 0.0))


def test_a_reward_counts_less_with_each_later_one() -> None:
    kept = math.exp(-1 / MEMORY)
    statistics = after(after(NO_PAST, [1.0]), [0.0])
    assert statistics.of_all.common == pytest.approx(kept / (1 + kept))
    for _ in range(1_000):
        statistics = after(statistics, [0.0])
    assert statistics.of_all.common == pytest.approx(0.0, abs=1e-4)


def test_mean_and_variance_are_those_of_the_weighted_rewards() -> None:
    rewards = np.random.default_rng(0).uniform(size=50)
    statistics = NO_PAST
    for reward in rewards:
        statistics = after(statistics, [reward])
    weights = np.exp(-np.arange(50)[::-1] / MEMORY)
    mean = np.average(rewards, weights=weights)
    assert statistics.of_all.common == pytest.approx(mean)
    assert statistics.of_all.variance == pytest.approx(np.average((rewards - mean) ** 2, weights=weights))


def test_each_task_has_its_own_and_all_count_in_that_of_all() -> None:
    statistics = after(NO_PAST, [1.0, 0.0, 0.0], ["a", "b", "b"])
    a, b, unknown = (statistics.find(key) for key in ("a", "b", "c"))
    assert a is not None
    assert b is not None
    assert (a.common, b.common) == (1.0, 0.0)
    assert unknown == statistics.of_all
    assert statistics.of_all.common == pytest.approx(1 / 3)


def test_what_is_not_scored_or_not_new_changes_nothing() -> None:
    rewards, is_new = np.array([1.0, math.nan, 5.0]), np.array([True, True, False])
    statistics = NO_PAST.after(rewards, np.zeros(3), np.arange(3), [""] * 3, is_new)
    assert statistics == after(NO_PAST, [1.0])
    assert statistics.after(rewards, np.zeros(3), np.arange(3), [""] * 3, np.zeros(3, np.bool_)) == statistics


def test_steps_and_rollouts_have_means_of_their_own() -> None:
    """Two rollouts with the outcomes 1 and 0, of which the first has three steps."""
    statistics = NO_PAST.after(
        np.array([1.0, 0.0]), np.array([0.3, 0.3, 0.0, 0.2]), np.array([0, 0, 0, 1]), ["", ""], np.ones(2, np.bool_)
    )
    assert (statistics.of_all.common, statistics.of_all.counted) == pytest.approx((0.5, 0.2))


def test_the_tasks_longest_without_a_rollout_are_forgotten() -> None:
    statistics = after(NO_PAST, [1.0] * MAX_KEYS, [f"t{n}" for n in range(MAX_KEYS)])
    assert len(statistics.entries) == MAX_KEYS
    assert "t0" not in statistics
    assert "t1" in statistics
    assert "" in statistics


def test_statistics_survive_in_a_checkpoint() -> None:
    statistics = after(NO_PAST, [1.0, 0.0], ["a", "b"])
    assert statistics_of(statistics.as_numbers()) == statistics
