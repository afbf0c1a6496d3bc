"""The algorithms of the reference trainer: an objective, and the values of the settings that belong to it.

- A new algorithm is a row of ALGORITHMS, and an Objective if none of those here is its own.
- An objective says what a token gains by becoming likelier, or less likely: a function of its log-ratio and its
  advantage. A log-ratio is log π - log π of the weights before, with the gradient of log π; advantages carry none.
- torch is not imported here; the caller has imported it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from stepwell.steps.advantages import BaselineKind

if TYPE_CHECKING:
    import torch

AlgorithmKind: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo"]


class Bounds(Protocol):
    """How far a policy may move from the one before: part of Settings."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...

    @property
    def dual_clip(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class Gains:
    gains_N: "torch.Tensor"
    clipped_N: "torch.Tensor"
    """Which tokens the bounds have changed."""


class Objective(Protocol):
    def gains(self, log_ratios_N: "torch.Tensor", advantages_N: "torch.Tensor", bounds: Bounds) -> Gains: ...


class ClippedRatio:
    """PPO's clip; a token with a negative advantage counts at most `dual_clip` times."""

    def gains(self, log_ratios_N: "torch.Tensor", advantages_N: "torch.Tensor", bounds: Bounds) -> Gains:
        ratios_N = log_ratios_N.exp()
        near_N = ratios_N.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
        gains_N = (ratios_N * advantages_N).minimum(near_N * advantages_N)
        bounded_N = gains_N.maximum(bounds.dual_clip * advantages_N.clamp(max=0)).where(advantages_N < 0, gains_N)
        return Gains(bounded_N, (bounded_N != ratios_N * advantages_N).detach())


class ClippedWeight:
    """CISPO: the ratio is a weight, which is clipped. So every token keeps a gradient."""

    def gains(self, log_ratios_N: "torch.Tensor", advantages_N: "torch.Tensor", bounds: Bounds) -> Gains:
        ratios_N = log_ratios_N.detach().exp()
        weights_N = ratios_N.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
        since_N = (log_ratios_N - log_ratios_N.detach()).exp()
        return Gains(weights_N * since_N * advantages_N, weights_N != ratios_N)


class PlainRatio:
    """REINFORCE: nothing is clipped."""

    def gains(self, log_ratios_N: "torch.Tensor", advantages_N: "torch.Tensor", bounds: Bounds) -> Gains:
        import torch

        return Gains(log_ratios_N.exp() * advantages_N, torch.zeros_like(advantages_N, dtype=torch.bool))


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
