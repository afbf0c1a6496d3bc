"""Another staleness rule is one class and one row."""

from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from typing import cast, get_args

import numpy as np
import pytest

from stepwell.commands.pool import PoolSettings
from stepwell.pool.api.explanations import why_not_trained
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.staleness import STALENESS_RULES, AgedStep, MaskStale, StalenessRule, staleness_rule
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.steps.step import BoolArray
from tests.builders import EasyPool


class HalveStale(StalenessRule):
    """Trains the first half of the tokens of old data."""

    def token_mask(self, step: AgedStep, policy_version: int) -> BoolArray | None:
        if policy_version - step.oldest_version <= self.max_staleness:
            return step.mask
        return np.arange(step.response_length) < step.response_length // 2

    def explain(self, behind: int) -> str:
        return "half of it is masked"


def test_the_setting_has_the_names_of_the_table() -> None:
    assert get_args(PoolSettings.model_fields["on_stale"].annotation) == tuple(STALENESS_RULES)
    default = next(field.default for field in fields(Limits) if field.name == "on_stale")
    assert default in STALENESS_RULES


def test_a_rule_is_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = cast("MutableMapping[str, type[StalenessRule]]", STALENESS_RULES)
    monkeypatch.setitem(rules, "halve", HalveStale)
    limits = Limits(max_staleness=0, on_stale="halve")
    pool = EasyPool(limits)
    pool.rollout("t", "p", response_ids=[1, 2, 3, 4])
    pool.policy_version = 1
    snapshot = TrajectorySnapshot("t", "p", "train", "", 1, 1, TrajectoryState.READY, steps=1, oldest_version=0)
    assert "half of it is masked" in why_not_trained(snapshot, limits, 1)
    taken = pool.take(1)
    assert taken is not None
    mask = taken[0][0].response_mask
    assert mask is not None
    assert mask.tolist() == [True, True, False, False]


def test_without_a_limit_data_of_any_age_is_shipped() -> None:
    for name in STALENESS_RULES:
        assert staleness_rule(None, name).explain(100) == ""


def test_data_that_is_young_enough_is_not_stale_though_its_own_mask_trains_nothing() -> None:
    @dataclass
    class Masked:
        response_length: int = 2
        mask: BoolArray | None = None
        version_spans: tuple[()] = ()
        oldest_version: int = 5

    masked = cast("AgedStep", Masked(mask=np.zeros(2, np.bool_)))
    assert not MaskStale(1).is_stale([masked], 6)
    assert MaskStale(1).is_stale([masked], 7)
