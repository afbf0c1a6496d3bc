"""The GRPO loss per token: functions of tensors with N trained tokens each.

- A batch's loss is the sum of its tokens' losses, each with a weight (trainers/aggregation.py). It does not depend on
  how tokens are divided into rows, and rows into passes.
- Advantages and recorded log-probabilities carry no gradient.
- torch is not imported here; the caller has imported it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.trainers.settings import Settings

if TYPE_CHECKING:
    import torch

ENTROPY_TOKENS = 256
"""Tokens whose entropy is computed at once."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyLoss:
    losses_N: "torch.Tensor"
    ratios_N: "torch.Tensor"
    """Importance ratios: how much likelier each token has become since it was sampled."""
    clipped_N: "torch.Tensor"
    """Which tokens are clipped or capped."""


def token_logprobs(
    model: "torch.nn.Module",
    ids_R_L: "torch.Tensor",
    attention_R_L: "torch.Tensor",
    trained_R_L: "torch.Tensor",
    temperatures: "torch.Tensor | float",
) -> "torch.Tensor":
    """The log-probability of each trained token, row by row. A row's first token has none.

    `temperatures` is one for all, or one for each trained token: the logits are divided by it.
    """
    distributions_N_V = token_distributions(model, ids_R_L, attention_R_L, trained_R_L, temperatures)
    return chosen_logprobs(distributions_N_V, ids_R_L, trained_R_L)


def token_distributions(
    model: "torch.nn.Module",
    ids_R_L: "torch.Tensor",
    attention_R_L: "torch.Tensor",
    trained_R_L: "torch.Tensor",
    temperatures: "torch.Tensor | float",
) -> "torch.Tensor":
    """The log-probabilities of the whole vocabulary at each trained token."""
    logits_R_L_V: torch.Tensor = model(input_ids=ids_R_L, attention_mask=attention_R_L).logits
    before_N_V = logits_R_L_V[:, :-1][trained_R_L[:, 1:]].float()
    of_tokens = temperatures if isinstance(temperatures, float) else temperatures[:, None]
    return (before_N_V / of_tokens).log_softmax(-1)


def chosen_logprobs(
    distributions_N_V: "torch.Tensor", ids_R_L: "torch.Tensor", trained_R_L: "torch.Tensor"
) -> "torch.Tensor":
    return distributions_N_V.gather(1, ids_R_L[:, 1:][trained_R_L[:, 1:]][:, None])[:, 0]


def entropies(distributions_N_V: "torch.Tensor") -> "torch.Tensor":
    """In nats, without a gradient. Some tokens at a time, to take little memory beside the distributions."""
    fixed_N_V = distributions_N_V.detach()
    entropies_N = fixed_N_V.new_empty(len(fixed_N_V))
    for start in range(0, len(fixed_N_V), ENTROPY_TOKENS):
        part = fixed_N_V[start : start + ENTROPY_TOKENS]
        entropies_N[start : start + ENTROPY_TOKENS] = -(part.exp() * part).sum(-1)
    return entropies_N


def policy_loss(
    logprobs_N: "torch.Tensor", recorded_N: "torch.Tensor", advantages_N: "torch.Tensor", settings: Settings
) -> PolicyLoss:
    """The clipped objective, relative to the log-probabilities recorded when the tokens were sampled."""
    ratios_N = (logprobs_N - recorded_N).exp()
    if settings.importance_cap is None:
        return _clipped(ratios_N, advantages_N, settings)
    return _weighted(logprobs_N, ratios_N.detach(), advantages_N, settings.importance_cap)


def _clipped(ratios_N: "torch.Tensor", advantages_N: "torch.Tensor", settings: Settings) -> PolicyLoss:
    """PPO's clip; a token with a negative advantage counts at most `dual_clip` times."""
    near_N = ratios_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gains_N = (ratios_N * advantages_N).minimum(near_N * advantages_N)
    bounded_N = gains_N.maximum(settings.dual_clip * advantages_N.clamp(max=0)).where(advantages_N < 0, gains_N)
    return PolicyLoss(
        losses_N=-bounded_N, ratios_N=ratios_N.detach(), clipped_N=(bounded_N != ratios_N * advantages_N).detach()
    )


def _weighted(
    logprobs_N: "torch.Tensor", ratios_N: "torch.Tensor", advantages_N: "torch.Tensor", cap: float
) -> PolicyLoss:
    """Truncated importance weights. There is one gradient step per batch, so the ratio to the current model is 1 and
    needs no clip."""
    since_N = (logprobs_N - logprobs_N.detach()).exp()
    return PolicyLoss(
        losses_N=-ratios_N.clamp(max=cap) * since_N * advantages_N, ratios_N=ratios_N, clipped_N=ratios_N > cap
    )


def kl_penalty(logprobs_N: "torch.Tensor", reference_N: "torch.Tensor") -> "torch.Tensor":
    """An unbiased estimate of the KL divergence from a reference that is never negative (k3), for tokens that were
    sampled with probabilities `logprobs_N`."""
    behind_N = reference_N - logprobs_N
    return behind_N.exp() - behind_N - 1
