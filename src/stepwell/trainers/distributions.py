"""The model's distribution at each trained token: log-probabilities, entropies, and the distance from a reference.

torch is not imported here; the caller has imported it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ENTROPY_TOKENS = 256
"""Tokens whose entropy is computed at once."""


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
    """Entropies in nats, without a gradient. Some tokens at a time, to take little memory beside the distributions."""
    fixed_N_V = distributions_N_V.detach()
    entropies_N = fixed_N_V.new_empty(len(fixed_N_V))
    for start in range(0, len(fixed_N_V), ENTROPY_TOKENS):
        part = fixed_N_V[start : start + ENTROPY_TOKENS]
        entropies_N[start : start + ENTROPY_TOKENS] = -(part.exp() * part).sum(-1)
    return entropies_N


def kl_penalty(logprobs_N: "torch.Tensor", reference_N: "torch.Tensor") -> "torch.Tensor":
    """An unbiased estimate of the KL divergence from a reference that is never negative (k3), for tokens that were
    sampled with probabilities `logprobs_N`."""
    behind_N = reference_N - logprobs_N
    return behind_N.exp() - behind_N - 1
