"""A policy with its own logits for every prefix, and its exact policy gradient by enumeration.

The probabilities are multiples of 1/4. So a group that has every rollout as often as it is probable stands for the
whole distribution, and its mean is the expectation without an error of sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

ANSWERS = 3
"""The policy chooses among the token ids below this. Higher ids are context."""
STATES = 4_099
SHARES = torch.tensor([2.0, 1.0, 1.0])
"""Of the three answers, in some order, at every prefix."""
PARTS = 4
"""The sum of the shares."""


class TreePolicy(torch.nn.Module):
    """A prefix selects a row of the table, so that a wrong context gives other logits."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        state = torch.zeros(len(input_ids), dtype=torch.long)
        states = []
        for ids, is_token in zip(input_ids.T, attention_mask.T.bool(), strict=True):
            state = torch.where(is_token, next_state(state, ids), state)
            states.append(state)
        return SimpleNamespace(logits=self.table[torch.stack(states, dim=1)])


def next_state(state: Any, token: Any) -> Any:
    return (state * 31 + token + 1) % STATES


def state_of(prefix: Sequence[int]) -> int:
    state = 0
    for token in prefix:
        state = next_state(state, token)
    return state


def random_table(temperature: float, seed: int) -> torch.Tensor:
    """Logits that give the shares at this temperature, in a random order for each state."""
    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(STATES, ANSWERS, generator=generator).argsort(dim=1)
    return temperature * (SHARES / PARTS).log()[orders]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token as an engine samples it."""

    prefix: tuple[int, ...]
    token: int
    step: int
    version: int


def share(table: torch.Tensor, temperature: float, sampled: SampledToken) -> int:
    """How many parts of PARTS the token has."""
    probability = (table[state_of(sampled.prefix)] / temperature).softmax(-1)[sampled.token].item()
    assert abs(probability * PARTS - round(probability * PARTS)) < 1e-4, "not a multiple"
    return round(probability * PARTS)


def logprob(table: torch.Tensor, temperature: float, sampled: SampledToken) -> torch.Tensor:
    return (table[state_of(sampled.prefix)] / temperature).log_softmax(-1)[sampled.token]
