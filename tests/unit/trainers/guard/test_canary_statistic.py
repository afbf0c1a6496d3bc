"""The sequential test: its error rates and how many rewards it needs, by simulation; and what it makes of rewards."""

import json
from dataclasses import asdict
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest
from stepwell.trainers.guard.statistics import WAITING, ComparisonState, SequentialTest

from stepwell.errors import BadRequest
from stepwell.pool.api.policy import VersionReward
from stepwell.trainers.guard.guard_settings import ComparisonSettings

STABLE, CANARY = 4, 5
RUNS = 300
NOISE = 0.03
"""Three standard deviations of a rate of 0.03 over the runs."""
PER_CANARY = 4
"""Rewards of the stable version for each of the canary, on average."""


class Simulated(NamedTuple):
    rollbacks: float
    """The share of runs that end so."""
    rewards: float
    """Of the canary until the decision; the median."""


def rewards_of(version: int, values: list[float], session: str = "") -> list[VersionReward]:
    return [VersionReward(version, value, f"{version}-{session}{n}") for n, value in enumerate(values)]


def simulate(stable: float, canary: float, settings: ComparisonSettings) -> Simulated:
    """Rewards are 1 with these probabilities, else 0."""
    random = np.random.default_rng(7)
    found: list[tuple[str, int]] = []
    for _ in range(RUNS):
        test = SequentialTest(settings)
        number = 0
        while (verdict := test.verdict()) is None:
            number += 1
            of_stable = [float(random.random() < stable) for _ in range(random.poisson(PER_CANARY))]
            came = rewards_of(STABLE, of_stable, f"{number}-") + rewards_of(
                CANARY, [float(random.random() < canary)], f"{number}-"
            )
            test.add(came, canary=CANARY, stable=STABLE)
        found.append((verdict.action, test.state.canary_rewards))
    return Simulated(sum(action == "rollback" for action, _ in found) / RUNS, median(count for _, count in found))


def test_a_great_fall_is_found_in_ten_rewards() -> None:
    found = simulate(0.8, 0.1, ComparisonSettings())
    assert found.rollbacks == 1.0
    assert found.rewards <= 10


@pytest.mark.parametrize("mean", [0.35, 0.8])
def test_a_version_that_is_as_good_is_seldom_rolled_back(mean: float) -> None:
    settings = ComparisonSettings()
    found = simulate(mean, mean, settings)
    assert found.rollbacks <= settings.alpha + NOISE
    assert found.rewards <= 60


@pytest.mark.parametrize("mean", [0.5, 0.8])
def test_a_version_that_is_worse_by_the_margin_is_seldom_promoted(mean: float) -> None:
    settings = ComparisonSettings()
    found = simulate(mean, mean - settings.margin, settings)
    assert 1.0 - found.rollbacks <= settings.beta + NOISE


def test_a_wider_margin_is_sooner_promoted() -> None:
    wide = simulate(0.8, 0.8, ComparisonSettings(margin=0.3))
    assert wide.rewards < 0.7 * simulate(0.8, 0.8, ComparisonSettings()).rewards


def test_a_test_with_a_small_margin_ends_if_the_canary_is_worse_by_half_of_it() -> None:
    """Neither bet would gain with the larger stakes alone: the rewards' variance costs more."""
    random, settings = np.random.default_rng(3), ComparisonSettings(margin=0.05)
    for run in range(4):
        test = SequentialTest(settings)
        for number in range(12_000):
            stable = rewards_of(
                STABLE, [float(chance < 0.5) for chance in random.random(PER_CANARY)], f"{run}-{number}-"
            )
            came = [*stable, *rewards_of(CANARY, [float(random.random() < 0.475)], f"{run}-{number}-")]
            test.add(came, canary=CANARY, stable=STABLE)
            if test.verdict() is not None:
                break
        assert test.verdict() is not None


def given(settings: ComparisonSettings, canary: list[float], stable: list[float]) -> SequentialTest:
    test = SequentialTest(settings)
    test.add([*rewards_of(STABLE, stable), *rewards_of(CANARY, canary)], canary=CANARY, stable=STABLE)
    return test


def test_the_reason_has_the_figures() -> None:
    verdict = given(ComparisonSettings(), [0.0] * 12, [1.0] * 24).verdict()
    assert verdict is not None
    assert verdict.action == "rollback"
    assert verdict.reason == (
        "worse than the stable version (alpha 0.05): mean reward 0.00 of 12 against 1.00 of 24, difference -1.00 in 12 "
        "comparisons"
    )


def test_rewards_of_other_versions_and_without_a_number_do_not_count() -> None:
    test = SequentialTest(ComparisonSettings())
    others = [*rewards_of(3, [0.0] * 9), *rewards_of(CANARY, [float("nan")] * 9)]
    test.add(others, canary=CANARY, stable=STABLE)
    assert test.state == ComparisonState()


def test_rewards_wait_for_those_of_the_other_version() -> None:
    test = given(ComparisonSettings(), [1.0, 1.0], [])
    assert (test.state.comparisons, test.capital_not_worse) == (0, 1.0)
    test.add(rewards_of(STABLE, [1.0]), canary=CANARY, stable=STABLE)
    assert test.state.comparisons == 1
    assert test.state.canary_waiting == test.state.stable_waiting == []


def test_rewards_that_came_before_those_of_the_canary_last_for_several_comparisons() -> None:
    test = given(ComparisonSettings(), [], [1.0] * 40)
    for number in range(10):
        test.add([VersionReward(CANARY, 0.0, f"late-{number}")], canary=CANARY, stable=STABLE)
    assert test.state.comparisons == 10
    assert test.mean_difference == -1.0


def test_rewards_that_wait_too_long_are_not_compared() -> None:
    test = given(ComparisonSettings(), [], [1.0] * 50 + [0.0] * WAITING)
    test.add(rewards_of(CANARY, [0.0]), canary=CANARY, stable=STABLE)
    assert test.mean_difference == 0.0


@pytest.mark.parametrize(("limit", "counted"), [(1, 2), (2, 4), (None, 20)])
def test_a_session_counts_with_some_rewards(limit: int | None, counted: int) -> None:
    test = SequentialTest(ComparisonSettings(rewards_per_session=limit))
    for _ in range(10):
        test.add(rewards_of(CANARY, [1.0, 1.0]), canary=CANARY, stable=STABLE)
    assert test.state.canary_rewards == counted


def test_margin_and_rewards_have_the_units_of_the_range() -> None:
    settings = ComparisonSettings(reward_range=(-1.0, 1.0), margin=0.4)
    wide = given(settings, [-1.0, 1.0, 0.5, 7.0], [1.0] * 4)
    unit = given(ComparisonSettings(margin=0.2), [0.0, 1.0, 0.75, 1.0], [1.0] * 4)
    assert (wide.state.worse, wide.state.not_worse) == (unit.state.worse, unit.state.not_worse)
    assert wide.canary_mean == pytest.approx(0.375)
    assert wide.mean_difference == pytest.approx(2 * unit.mean_difference)


@pytest.mark.parametrize("canary", [0.35, 0.45])
def test_a_mean_without_evidence_decides_nothing(canary: float) -> None:
    assert given(ComparisonSettings(), [canary] * 12, [0.5] * 12).verdict() is None


def test_the_outlook_says_how_much_evidence_there_is_and_how_long_it_takes() -> None:
    test = SequentialTest(ComparisonSettings())
    for number in range(6):
        test.add(
            [*rewards_of(STABLE, [1.0], f"{number}-"), *rewards_of(CANARY, [1.0], f"{number}-")],
            canary=CANARY,
            stable=STABLE,
        )
    promote, rollback = test.evidence
    assert 0.3 < promote < 0.7
    assert rollback == 0.0
    remaining = test.remaining(360.0)
    assert remaining is not None
    decided = 6
    while test.verdict() is None:
        decided += 1
        came = [*rewards_of(STABLE, [1.0], f"{decided}-"), *rewards_of(CANARY, [1.0], f"{decided}-")]
        test.add(came, canary=CANARY, stable=STABLE)
    assert remaining == pytest.approx(60.0 * (decided - 6), rel=0.4)


@pytest.mark.parametrize(
    ("canary", "stable", "outlook"),
    [
        ([], [1.0], "without comparisons it has no end"),
        ([0.0, 1.0], [1.0, 0.0], "how long it will take cannot be said yet"),
        ([1.0] * 6, [1.0] * 6, "at this rate (0.6 comparisons a minute) about "),
    ],
)
def test_the_outlook_in_words(canary: list[float], stable: list[float], outlook: str) -> None:
    told = given(ComparisonSettings(), canary, stable).outlook(600.0)
    assert told.startswith("no decision after 10 min: evidence ")
    assert outlook in told


def test_a_test_goes_on_from_its_state() -> None:
    settings = ComparisonSettings()
    whole = given(settings, [0.2, 0.9, 0.4], [0.5, 0.6, 0.7, 0.1])
    first = SequentialTest(settings)
    first.add(rewards_of(STABLE, [0.5, 0.6, 0.7, 0.1]), canary=CANARY, stable=STABLE)
    second = SequentialTest(settings, ComparisonState(**json.loads(json.dumps(asdict(first.state)))))
    second.add(rewards_of(CANARY, [0.2, 0.9, 0.4]), canary=CANARY, stable=STABLE)
    assert second.state == whole.state


@pytest.mark.parametrize("wrong", [{"margin": 0.0}, {"margin": 1.0}, {"alpha": 0.0}, {"beta": 1.0}])
def test_settings_without_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest):
        ComparisonSettings(**wrong)  # type: ignore[arg-type]
