import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepwell.steps.advantages import group_advantages


def test_a_rollout_is_measured_by_its_group() -> None:
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 1.0, 5.0, 3.0]), np.array([0, 0, 0, 0, 1, 1]), 1e-6)
    np.testing.assert_allclose(advantages, [0.866, -0.866, -0.866, 0.866, 0.7071, -0.7071], atol=1e-3)


def test_where_all_earned_the_same_there_is_nothing_to_learn() -> None:
    assert group_advantages(np.array([0.1, 0.1, 0.1, 7.0]), np.array([0, 0, 0, 1])).tolist() == [0.0] * 4


def test_an_unscored_rollout_has_no_advantage_and_counts_for_nothing() -> None:
    with_one = group_advantages(np.array([1.0, np.nan, 0.0]), np.array([0, 0, 0]))
    without = group_advantages(np.array([1.0, 0.0]), np.array([0, 0]))
    assert np.isnan(with_one[1])
    assert with_one[[0, 2]].tolist() == without.tolist()


@example([[0.0, 0.0, 2.02462e-9]])  # two differences are as small as rounding, the third is not
@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=8), min_size=1, max_size=6))
def test_the_advantages_of_a_group_sum_to_nothing_and_know_no_other_group(groups: list[list[float]]) -> None:
    rewards = np.array([reward for group in groups for reward in group])
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    advantages = group_advantages(rewards, group_of)
    for g, group in enumerate(groups):
        alone = group_advantages(np.array(group), np.zeros(len(group), np.int64))
        assert advantages[group_of == g].tolist() == alone.tolist()
        assert alone.sum() == pytest.approx(0.0, abs=1e-6)
