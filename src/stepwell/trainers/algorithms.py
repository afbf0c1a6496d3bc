"""The algorithms of the reference trainer: an objective, and the values of the settings that belong to it.

A new algorithm is a row of ALGORITHMS, and an Objective if none of those here is its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepwell.steps.baselines import BaselineKind
from stepwell.trainers.aggregation import LossAggregation
from stepwell.trainers.objectives import ClippedRatio, ClippedWeight, Objective, PlainRatio

AlgorithmKind: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmDefaults:
    """The settings that an algorithm decides, unless they are given. All names are those of Settings."""

    baseline: BaselineKind = "group"
    divide_by_std: bool = True
    loss_aggregation: LossAggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    objective: Objective
    defaults: AlgorithmDefaults
    by_sequence: bool = False
    """Has every token of a rollout the same ratio, the geometric mean of those of its tokens?"""


ALGORITHMS: Mapping[AlgorithmKind, Algorithm] = {
    "grpo": Algorithm(objective=ClippedRatio(), defaults=AlgorithmDefaults(clip_high=0.28)),
    "dr_grpo": Algorithm(
        objective=ClippedRatio(), defaults=AlgorithmDefaults(divide_by_std=False, loss_aggregation="fixed_length")
    ),
    "rloo": Algorithm(
        objective=PlainRatio(),
        defaults=AlgorithmDefaults(
            baseline="leave_one_out", divide_by_std=False, loss_aggregation="fixed_length", importance_cap=2.0
        ),
    ),
    "reinforce_plus_plus": Algorithm(objective=ClippedRatio(), defaults=AlgorithmDefaults(baseline="batch")),
    "gspo": Algorithm(
        objective=ClippedRatio(),
        defaults=AlgorithmDefaults(loss_aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
        by_sequence=True,
    ),
    "cispo": Algorithm(objective=ClippedWeight(), defaults=AlgorithmDefaults(clip_low=1.0, clip_high=4.0)),
}
