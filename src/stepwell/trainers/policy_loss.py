"""The loss per token: functions of tensors with N trained tokens each.

Three policies take part: the one that sampled the tokens, the proximal one (the weights before the first gradient step
of a batch), and the current one.

- A batch's loss is the sum of its tokens' losses, each with a weight (trainers/algorithms.py). It does not depend on
  how tokens are divided into rows, and rows into passes.
- Without an importance cap, the objective compares the current policy with the one that sampled.
- With one, it compares the current policy with the proximal one, and tokens have importance weights: how much likelier
  the proximal policy makes them than the one that sampled.
- Advantages, log-ratios and importance weights carry no gradient.
- torch is not imported here; the caller has imported it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from stepwell.steps.layout import IndexArray, offsets
from stepwell.trainers.algorithms import ALGORITHMS
from stepwell.trainers.settings import Settings

if TYPE_CHECKING:
    import torch

LARGEST_LOG_RATIO = 20.0
"""Larger ones are not told apart: the gradient of a ratio that overflows is no number."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LogRatios:
    """How much likelier tokens have become, without a gradient. Their sum is what happened since they were sampled."""

    to_proximal_N: "torch.Tensor"
    """The change from the policy that sampled to the proximal one."""
    since_proximal_N: "torch.Tensor"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyLoss:
    losses_N: "torch.Tensor"
    ratios_N: "torch.Tensor"
    """Importance ratios: how much likelier each token, or its sequence, has become since it was sampled."""
    clipped_N: "torch.Tensor"
    """Which tokens are clipped, capped or masked."""


def log_ratios(logprobs_N: "torch.Tensor", recorded_N: "torch.Tensor", proximal_N: "torch.Tensor | None") -> LogRatios:
    """The log-ratios of each token. Without `proximal_N` the current policy is the proximal one."""
    now_N = logprobs_N.detach()
    before_N = now_N if proximal_N is None else proximal_N
    return LogRatios(to_proximal_N=before_N - recorded_N, since_proximal_N=now_N - before_N)


def sequence_log_ratios(parts: Sequence[LogRatios], sequences: Sequence[IndexArray]) -> list[LogRatios]:
    """Each token's are the means over the tokens of its sequence, which may be in several parts."""
    import torch

    _, number_of_N, counts = np.unique(np.concatenate(sequences), return_inverse=True, return_counts=True)
    ends, device = offsets(np.array([len(of_part) for of_part in sequences])), parts[0].since_proximal_N.device
    sequence_of_N, lengths = torch.from_numpy(number_of_N.ravel()).to(device), torch.from_numpy(counts).to(device)

    def means(values: "Sequence[torch.Tensor]") -> "list[torch.Tensor]":
        sums = torch.zeros(len(counts), dtype=torch.float64, device=device)
        sums.index_add_(0, sequence_of_N, torch.cat(list(values)).double())
        means_N = (sums / lengths)[sequence_of_N].float()
        return [means_N[start:end] for start, end in pairwise(ends.tolist())]

    to_proximal = means([part.to_proximal_N for part in parts])
    since = means([part.since_proximal_N for part in parts])
    pairs = zip(to_proximal, since, strict=True)
    return [LogRatios(to_proximal_N=before_N, since_proximal_N=after_N) for before_N, after_N in pairs]


def policy_loss(
    logprobs_N: "torch.Tensor", ratios: LogRatios, advantages_N: "torch.Tensor", settings: Settings
) -> PolicyLoss:
    """The negative gain of each token, by the objective of the algorithm."""
    sampled_N = (ratios.to_proximal_N + ratios.since_proximal_N).clamp(max=LARGEST_LOG_RATIO)
    moved_N = sampled_N
    if settings.importance_cap is not None:
        moved_N = ratios.since_proximal_N.clamp(max=LARGEST_LOG_RATIO)
    objective = ALGORITHMS[settings.algorithm].objective
    gained = objective.gains(moved_N + (logprobs_N - logprobs_N.detach()), advantages_N, settings)
    losses_N, clipped_N = -gained.gains_N, gained.clipped_N
    if settings.importance_cap is not None:
        importance_N = ratios.to_proximal_N.clamp(max=LARGEST_LOG_RATIO).exp()
        losses_N = losses_N * importance_weights(importance_N, settings)
        clipped_N = clipped_N | (importance_N > settings.importance_cap)
    return PolicyLoss(losses_N=losses_N, ratios_N=sampled_N.exp(), clipped_N=clipped_N)


def importance_weights(ratios_N: "torch.Tensor", settings: Settings) -> "torch.Tensor":
    """Larger ratios than the cap count as the cap, or not at all."""
    assert settings.importance_cap is not None
    if settings.importance_sampling == "masked":
        return ratios_N.where(ratios_N <= settings.importance_cap, 0.0)
    return ratios_N.clamp(max=settings.importance_cap)
