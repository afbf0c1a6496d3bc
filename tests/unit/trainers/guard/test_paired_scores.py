"""Validation compares versions on the same tasks: how often it refuses an equal one, by simulation."""

import numpy as np
import pytest
from stepwell.trainers.guard.statistics import Scores, compare, refusal

from stepwell.errors import BadRequest
from stepwell.trainers.guard.guard_settings import GuardSettings

SETTINGS = GuardSettings()
RUNS = 1000


def drawn(random: np.random.Generator, mean: float, tasks: int) -> Scores:
    """Each task is solved or not."""
    return dict(zip(map(str, range(tasks)), random.binomial(1, mean, tasks).tolist(), strict=True))


def refused(mean: float, other: float, tasks: int) -> float:
    random = np.random.default_rng(3)
    pairs = ((drawn(random, other, tasks), drawn(random, mean, tasks)) for _ in range(RUNS))
    return sum(compare(scores, stable, 1).is_worse(SETTINGS) for scores, stable in pairs) / RUNS


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.7, 0.97])
@pytest.mark.parametrize("tasks", [10, 20, 100, 500])
def test_an_equal_version_is_seldom_refused(mean: float, tasks: int) -> None:
    noise = 3 * (0.05 * 0.95 / RUNS) ** 0.5
    assert refused(mean, mean, tasks) <= SETTINGS.alpha + noise


def test_a_loss_that_is_larger_than_chance_is_refused() -> None:
    assert refused(0.7, 0.5, 100) > 0.8
    assert refused(0.7, 0.6, 500) > 0.8


def test_equal_versions_are_not_refused_more_often_the_more_there_were() -> None:
    """The stable version is the last that has passed; the best of many noisy scores would refuse most versions."""
    random, late = np.random.default_rng(5), 0
    for _ in range(10):
        kept: Scores | None = None
        for number in range(120):
            scores = drawn(random, 0.7, 100)
            is_refused = refusal(scores, 1, kept, lambda: drawn(random, 0.7, 100), SETTINGS) is not None
            kept = kept if is_refused else scores
            late += is_refused and number >= 100
    assert late / 200 <= 0.08


def test_each_task_is_compared_with_itself() -> None:
    tasks = {f"hard-{n}": 0.0 for n in range(50)} | {f"easy-{n}": 1.0 for n in range(50)}
    worse = tasks | {f"easy-{n}": 0.0 for n in range(8)} | {"unknown": 1.0, "broken": float("nan")}
    found = compare(worse, tasks | {"broken": 1.0}, 1)
    assert found.mean == pytest.approx(-0.08)
    assert found.tasks == 100
    assert found.is_worse(SETTINGS)
    assert not compare(tasks, tasks, 1).is_worse(SETTINGS)


def test_a_loss_within_the_margin_is_not_refused_however_sure_it_is() -> None:
    stable = dict.fromkeys(map(str, range(100)), 0.5)
    assert not compare(dict.fromkeys(stable, 0.46), stable, 1).is_worse(SETTINGS)
    assert compare(dict.fromkeys(stable, 0.44), stable, 1).is_worse(SETTINGS)


def test_kept_scores_let_a_version_pass_and_never_refuse_it() -> None:
    low, high = {str(n): float(n < 60) for n in range(100)}, {str(n): float(n < 90) for n in range(100)}
    assert refusal(high, 1, low, pytest.fail, SETTINGS) is None
    assert refusal(low, 1, high, lambda: low, SETTINGS) is None
    assert refusal(low, 1, high, lambda: None, SETTINGS) is None
    found = refusal(low, 1, high, lambda: high, SETTINGS)
    assert found is not None
    assert found.mean == pytest.approx(-0.3)


def test_scores_without_common_tasks_are_refused() -> None:
    with pytest.raises(BadRequest, match="1 tasks"):
        compare({"a": 1.0, "b": 0.0}, {"a": 0.0, "c": 1.0}, 1)
