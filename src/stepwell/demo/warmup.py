"""The supervised warm-up: it teaches a new model to speak a task's format, and to be wrong in the right ways.

Reinforcement selects among what a model does now and then. So the wrong answers shown here are wrong copies (the right
letters in another order, an operand in the place of the result), never random ones: from those nothing was learned.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from stepwell.demo.vocabulary import END_OF_TEXT, Turn, make_tokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

STEPS = 400
EXAMPLES = 64
"""In a step."""
RATE = 2e-3
RISING = 20
"""Steps in which the rate rises; it falls all the while, to a tenth."""
IGNORED = -100
"""The label of a token that is not learned; torch's own."""


def warm_up(model: "torch.nn.Module", conversations: Iterator[Sequence[Turn]], steps: int = STEPS) -> float:
    """Show the model one conversation after another, of which it learns the assistant's turns; gives the last loss."""
    import torch

    tokenizer = make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
    for _ in range(steps):
        ids, labels = _batch(tokenizer, list(islice(conversations, EXAMPLES)))
        logits = model(input_ids=ids, attention_mask=(ids != END_OF_TEXT).long()).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def share_of_rate(step: int) -> float:
    return min(1.0, (step + 1) / RISING) * (1.0 - 0.9 * step / STEPS)


def _batch(tokenizer: "Tokenizer", conversations: Sequence[Sequence[Turn]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ids and labels, padded on the right."""
    import torch

    rows = [row(tokenizer, conversation) for conversation in conversations]
    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [END_OF_TEXT] * (longest - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


def row(tokenizer: "Tokenizer", conversation: Sequence[Turn]) -> tuple[list[int], list[int]]:
    """Its ids and its labels."""
    ids: list[int] = []
    labels: list[int] = []
    for turn in conversation:
        opening, said = (tokenizer.encode(text).ids for text in (turn.opening, turn.said))
        ids += opening + said
        labels += [IGNORED] * len(opening) + (said if turn.role == "assistant" else [IGNORED] * len(said))
    return ids, labels
