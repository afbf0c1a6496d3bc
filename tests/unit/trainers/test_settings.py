from dataclasses import fields, replace
from typing import Any

import pytest

from stepwell.errors import BadRequest
from stepwell.trainers.algorithms import ALGORITHMS, AlgorithmDefaults, AlgorithmKind
from stepwell.trainers.settings import BY_ALGORITHM, RowSettings, Settings


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_brings_its_values(algorithm: AlgorithmKind) -> None:
    settings = Settings(algorithm=algorithm)
    for decided in fields(AlgorithmDefaults):
        assert getattr(settings, decided.name) == getattr(ALGORITHMS[algorithm].defaults, decided.name)


def test_a_value_that_is_given_counts() -> None:
    settings = Settings(algorithm="rloo", divide_by_std=True, importance_cap=None)
    assert (settings.baseline, settings.divide_by_std, settings.importance_cap) == ("leave_one_out", True, None)


def test_without_an_algorithm_rows_are_those_of_grpo() -> None:
    assert (Settings().algorithm, RowSettings().baseline, RowSettings().divide_by_std) == ("grpo", "group", True)
    assert (Settings().baseline, Settings().divide_by_std) == ("group", True)


def test_no_setting_is_left_open() -> None:
    settings = Settings(algorithm="gspo")
    assert [field.name for field in fields(Settings) if getattr(settings, field.name) is BY_ALGORITHM] == []


def test_settings_are_changed_within_an_algorithm_but_not_made_those_of_another() -> None:
    settings = replace(Settings(algorithm="cispo"), groups=4)
    assert (settings.groups, settings.clip_high) == (4, 4.0)
    with pytest.raises(BadRequest, match=r"values of cispo; make new ones: Settings\(algorithm='rloo'"):
        replace(settings, algorithm="rloo")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"algorithm": "ppo"}, "algorithm is one of grpo, dr_grpo, rloo"),
        ({"importance_sampling": "clipped"}, "importance_sampling is one of truncated, masked"),
        ({"importance_sampling": "masked"}, "needs an importance_cap"),
        ({"minibatches": 0}, "minibatches is at least 1"),
        ({"max_refills": -1}, "max_refills at least 0"),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        Settings(**given)
