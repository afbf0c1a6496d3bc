"""Another consequence of staleness is one class and one row."""

from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from typing import cast, get_args

import numpy as np
import pytest

from rig.builders import EasyPool
from stepwell.commands.pool import PoolSettings
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.staleness import (
    CONSEQUENCES,
    DISTANCES,
    AgedStep,
    Consequence,
    MaskStale,
    Present,
    VersionsBehind,
    consequence_of,
)
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState, why_not_trained
from stepwell.steps.step import BoolArray


class HalveStale(Consequence):
    """Trains the first half of the tokens of old data."""

    def token_mask(self, step: AgedStep, present: Present) -> BoolArray | None:
        if not self.is_old((step,), present):
            return step.mask
        return np.arange(step.response_length) < step.response_length // 2

    def explain(self, distance: float) -> str:
        return "half of it is masked"


def test_the_setting_has_the_names_of_the_table() -> None:
    assert get_args(PoolSettings.model_fields["on_stale"].annotation) == tuple(CONSEQUENCES)
    default = next(field.default for field in fields(Limits) if field.name == "on_stale")
    assert default in CONSEQUENCES
    assert Limits().stale_by in DISTANCES


def test_a_consequence_is_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    table = cast("MutableMapping[str, type[Consequence]]", CONSEQUENCES)
    monkeypatch.setitem(table, "halve", HalveStale)
    limits = Limits(max_staleness=0, on_stale="halve")
    pool = EasyPool(limits)
    pool.rollout("t", "p", response_ids=[1, 2, 3, 4])
    pool.policy_version = 1
    snapshot = TrajectorySnapshot("t", "p", "train", "", 1, 1, TrajectoryState.READY, steps=1, oldest_version=0)
    assert "half of it is masked" in why_not_trained(snapshot, limits, Present(1, 0.0))
    taken = pool.take(1)
    assert taken is not None
    mask = taken[0][0].response_mask
    assert mask is not None
    assert mask.tolist() == [True, True, False, False]


def test_without_a_limit_data_of_any_age_is_shipped() -> None:
    for name in CONSEQUENCES:
        assert consequence_of(Limits(on_stale=name)).explain(100) == ""


def test_data_that_is_young_enough_is_not_stale_though_its_own_mask_trains_nothing() -> None:
    @dataclass
    class Masked:
        started_at: float = 0.0
        response_length: int = 2
        mask: BoolArray | None = None
        version_spans: tuple[()] = ()
        oldest_version: int = 5

    masked = cast("AgedStep", Masked(mask=np.zeros(2, np.bool_)))
    rule = MaskStale(VersionsBehind(), 1)
    assert not rule.is_stale([masked], Present(6, 0.0))
    assert rule.is_stale([masked], Present(7, 0.0))
