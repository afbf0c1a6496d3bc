"""Models of a few hundred parameters, and rollouts for them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from rig.builders import make_step
from stepwell.steps.step import Step, logprobs_array

VOCABULARY = 12


class Bigram(torch.nn.Module):
    """A token depends on the one before it alone: what stood further back does not matter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.table(input_ids))


class Recurrent(torch.nn.Module):
    """A token depends on all before it. With dropout, so that training draws random numbers."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.cell = torch.nn.GRU(8, 8, batch_first=True)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        states, _ = self.cell(self.embedding(input_ids))
        return SimpleNamespace(logits=self.head(self.dropout(states)))


def logprobs_by(model: torch.nn.Module, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        table = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].log_softmax(-1)
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]


def one_turn(uid: str, prompt_uid: str, prompt: Sequence[int], response: Sequence[int], **fields: Any) -> Step:
    fields.setdefault("response_logprobs", logprobs_array([-2.0] * len(response)))
    fields.setdefault("temperature", 1.0)
    return make_step(uid, prompt_uid, prompt_ids=prompt, response_ids=response, uid=f"{uid}-{len(prompt)}", **fields)
