"""How the losses of a batch's tokens become its loss: the weight of each token.

- A sequence is a rollout, however many rows it has; a step, if single steps are trained.
- Weights depend on what is trained alone, not on how it is divided into rows and passes.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.layout import IndexArray

LossAggregation: TypeAlias = Literal["token_mean", "sequence_mean", "fixed_length"]
Weights: TypeAlias = NDArray[np.float64]
Aggregation: TypeAlias = Callable[[IndexArray, int], Weights]
"""A function from the sequence of each of N tokens and the fixed length to the weight of each."""


def token_mean(sequence_of_N: IndexArray, length: int) -> Weights:
    """All tokens count the same: a long rollout counts more."""
    return np.full(len(sequence_of_N), 1.0 / max(len(sequence_of_N), 1))


def sequence_mean(sequence_of_N: IndexArray, length: int) -> Weights:
    """All rollouts count the same: a token of a long rollout counts less."""
    _, number_of_N, tokens = np.unique(sequence_of_N, return_inverse=True, return_counts=True)
    return (1.0 / (len(tokens) * tokens))[number_of_N.ravel()]


def fixed_length(sequence_of_N: IndexArray, length: int) -> Weights:
    """The sum over a rollout's tokens, divided by a number that does not depend on it (Dr. GRPO)."""
    return np.full(len(sequence_of_N), 1.0 / max(len(np.unique(sequence_of_N)) * length, 1))


AGGREGATIONS: Mapping[LossAggregation, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "fixed_length": fixed_length,
}


def token_weights(kind: LossAggregation, sequence_of_N: IndexArray, length: int) -> Weights:
    if kind not in AGGREGATIONS:
        raise BadRequest(f"loss_aggregation is one of {', '.join(AGGREGATIONS)}, not {kind!r}")
    return AGGREGATIONS[kind](sequence_of_N, length)
