"""What a token gains by becoming likelier, or less likely: functions of its log-ratio and its advantage.

- A log-ratio is log π - log π of the weights before, with the gradient of log π.
- Advantages carry no gradient.
- torch is not imported here; the caller has imported it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


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
