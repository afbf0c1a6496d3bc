import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.advantages import (
    BASELINES,
    AdvantageKind,
    BaselineInputs,
    BaselineKind,
    RunningEntry,
    RunningStatistics,
    baseline_advantages,
    compare_rollouts,
    compare_steps,
)

WITHIN_GROUPS: tuple[BaselineKind, ...] = ("group", "leave_one_out")


def advantages(
    returns: list[float],
    groups: list[int],
    baseline: BaselineKind,
    fallback: BaselineKind = "none",
    *,
    by_std: bool = False,
) -> list[float]:
    compared = compare_rollouts(np.array(returns), np.array(groups))
    computed = baseline_advantages(compared, baseline, fallback, divide_by_std=by_std)
    return [round(float(value), 4) for value in computed]


def steps_of(
    kind: AdvantageKind, rewards: list[list[float]], outcomes: list[float], groups: list[int]
) -> BaselineInputs:
    counts = [len(of_rollout) for of_rollout in rewards]
    return compare_steps(
        kind,
        np.array([sum(of) + outcome for of, outcome in zip(rewards, outcomes, strict=True)]),
        np.array(outcomes),
        np.array([value for of_rollout in rewards for value in of_rollout], np.float64),
        np.repeat(np.arange(len(rewards)), counts),
        np.array(groups),
        np.concatenate([np.arange(count) for count in counts]),
    )


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("group", [0.5, -0.5, 2.0, -2.0]),
        ("leave_one_out", [1.0, -1.0, 4.0, -4.0]),
        ("batch", [-1.25, -2.25, 3.75, -0.25]),
        ("running", [-1.25, -2.25, 3.75, -0.25]),
        ("none", [1.0, 0.0, 6.0, 2.0]),
    ],
)
def test_each_baseline_subtracts_its_own_mean(baseline: BaselineKind, expected: list[float]) -> None:
    """A first batch has no past, so `running` takes its own mean."""
    assert advantages([1.0, 0.0, 6.0, 2.0], [0, 0, 1, 1], baseline) == expected


def test_each_baseline_divides_by_the_deviation_of_what_it_compares() -> None:
    returns, groups = [1.0, 0.0, 6.0, 2.0], [0, 0, 1, 1]
    half = round(0.5**0.5, 3)
    assert advantages(returns, groups, "group", by_std=True) == pytest.approx([half, -half, half, -half], abs=1e-3)
    scale = float(np.std(returns, ddof=1))
    expected = [round(value / scale, 3) for value in (-1.25, -2.25, 3.75, -0.25)]
    assert advantages(returns, groups, "batch", by_std=True) == pytest.approx(expected, abs=1e-3)
    assert advantages(returns, groups, "none", by_std=True) == returns


@pytest.mark.parametrize("baseline", WITHIN_GROUPS)
def test_groups_of_one_have_the_fallback_and_the_others_do_not(baseline: BaselineKind) -> None:
    returns, groups = [1.0, 0.0, 4.0, 3.0], [0, 0, 1, 2]
    assert advantages(returns, groups, baseline)[2:] == [0.0, 0.0]
    assert advantages(returns, groups, baseline, "group")[2:] == [0.0, 0.0]
    with_batch = advantages(returns, groups, baseline, "batch")
    assert with_batch[:2] == advantages(returns, groups, baseline)[:2]
    assert with_batch[2:] == [2.0, 1.0]


def test_a_group_of_which_one_rollout_is_scored_is_a_group_of_one() -> None:
    computed = advantages([1.0, np.nan, 0.0], [0, 0, 1], "group", "batch")
    assert computed[0] == 0.5
    assert np.isnan(computed[1])
    assert computed[2] == -0.5


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(BadRequest, match="a baseline is one of group, leave_one_out, batch, running, none, not 'mean'"):
        advantages([1.0], [0], "mean")  # type: ignore[arg-type]


# -- running -----------------------------------------------------------------------------------------------------------


def with_past(returns: list[float], keys: list[str], past: dict[str, RunningEntry]) -> NDArray[np.float64]:
    compared = compare_steps(
        "rollout",
        np.array(returns),
        np.array(returns),
        np.zeros(len(returns)),
        np.arange(len(returns)),
        np.arange(len(returns)),
        np.zeros(len(returns), np.int64),
        keys_T=keys,
        past=RunningStatistics(past),
    )
    return baseline_advantages(compared, "group", "running", divide_by_std=False)


def test_a_rollout_is_compared_with_the_mean_before_its_batch() -> None:
    past = {"": RunningEntry(0.5, common=0.25)}
    assert with_past([1.0, 1.0, 0.0], [""] * 3, past).tolist() == [0.75, 0.75, -0.25]


def test_a_task_has_its_own_mean_and_a_new_one_that_of_all() -> None:
    past = {"easy": RunningEntry(0.5, common=0.9), "": RunningEntry(0.5, common=0.5)}
    assert with_past([1.0, 1.0], ["easy", "new"], past).tolist() == pytest.approx([0.1, 0.5])


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30))
def test_an_advantage_stays_small_after_few_rewards_and_after_many_equal_ones(rewards: list[float]) -> None:
    past = RunningStatistics()
    for reward in [*rewards, *[1.0] * 50, 0.0]:
        compared = compare_rollouts(np.array([reward]), np.array([0]))
        compared = BaselineInputs(
            **{name: getattr(compared, name) for name in BaselineInputs.__slots__} | {"past": past}
        )
        (advantage,) = baseline_advantages(compared, "running", "none", divide_by_std=True).tolist()
        assert abs(advantage) <= 10.0
        past = compared.after()


# -- steps -------------------------------------------------------------------------------------------------------------


def test_steps_of_groups_of_one_are_compared_without_steps_at_the_same_place() -> None:
    compared = steps_of("step", [[1.0, 0.0], [0.0], [1.0, 1.0, 0.0]], [0.0] * 3, [0, 1, 2])
    computed = baseline_advantages(compared, "group", "batch", divide_by_std=False)
    assert computed.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("kind", ["step", "reward_to_go"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch", "running"])
def test_nearly_equal_returns_do_not_make_the_advantages_of_steps_large(
    kind: AdvantageKind, baseline: BaselineKind
) -> None:
    """They were divided by the deviation of the returns, which may be near 0 while the steps differ."""
    compared = steps_of(kind, [[1.0, 0.0, 0.001], [0.0, 1.0, 0.0]], [0.0, 0.0], [0, 0])
    computed = baseline_advantages(compared, baseline, "none", divide_by_std=True)
    assert 0.5 < np.abs(computed).max() < 3.0


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from(list(BASELINES)),
    st.booleans(),
)
def test_without_step_rewards_all_kinds_are_the_same_under_every_baseline(
    made: list[list[float]], baseline: BaselineKind, by_std: bool
) -> None:
    """The lists are rollouts; their first number is the outcome, their length the number of steps."""
    groups = [number // 3 for number in range(len(made))]
    of_rollouts, *others = (
        baseline_advantages(
            steps_of(kind, [[0.0] * len(steps) for steps in made], [steps[0] for steps in made], groups),
            baseline,
            "running",
            divide_by_std=by_std,
        )
        for kind in ("rollout", "step", "reward_to_go")
    )
    for computed in others:
        np.testing.assert_allclose(computed, of_rollouts, atol=1e-9)
