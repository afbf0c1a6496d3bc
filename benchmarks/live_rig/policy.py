"""The demo's model as a policy of this process: it is sampled without an engine, and its expected reward is exact.

The task is the demo's `rev`: reverse a word of three letters. All prompts have the same length, so a batch of them
needs no padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stepwell.demo.model import END_OF_TURN, STEPS, ScriptTurn, make_model, make_tokenizer, warm_up
from stepwell.demo.tasks import TASKS, shown, split

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

TASK = TASKS["rev"]
MAX_TOKENS = 5
"""Of an answer, as in the demo."""


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    is_right: bool


class LocalPolicy:
    """`model` is the one that a trainer changes: every answer comes from the newest weights."""

    def __init__(self, model: "Qwen2ForCausalLM", seed: int) -> None:
        self.model = model
        self._tokenizer = make_tokenizer()
        self._random = torch.Generator().manual_seed(seed)

    def answer(self, words: Sequence[str]) -> list[Answer]:
        """One sampled answer to each word, at temperature 1."""
        prompts = [self._prompt(word) for word in words]
        ids = torch.tensor(prompts)
        logprobs = torch.zeros(len(words), 0)
        for _ in range(MAX_TOKENS):
            table = self._logprobs(ids)[:, -1]
            chosen = torch.multinomial(table.exp(), 1, generator=self._random)
            ids = torch.cat([ids, chosen], dim=1)
            logprobs = torch.cat([logprobs, table.gather(1, chosen)], dim=1)
        sampled = ids[:, len(prompts[0]) :].tolist()
        return [self._cut(word, *one) for word, *one in zip(words, prompts, sampled, logprobs.tolist(), strict=True)]

    def expected_reward(self, words: Sequence[str]) -> float:
        """The mean probability of the right answer."""
        prompts, right = [self._prompt(word) for word in words], [self._right(word) for word in words]
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, right, strict=True)])
        begins = len(prompts[0])
        table = self._logprobs(ids)[:, begins - 1 : -1]
        return table.gather(2, ids[:, begins:, None]).sum(dim=(1, 2)).exp().mean().item()

    def _logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return logits.log_softmax(-1)

    def _cut(self, word: str, prompt: list[int], sampled: list[int], logprobs: list[float]) -> Answer:
        """The answer up to the end of its turn."""
        length = sampled.index(END_OF_TURN) + 1 if END_OF_TURN in sampled else len(sampled)
        return Answer(prompt, sampled[:length], logprobs[:length], sampled[:length] == self._right(word))

    def _prompt(self, word: str) -> list[int]:
        asked, opening = ScriptTurn("user", word), ScriptTurn("assistant", "").opening
        return self._tokenizer.encode(asked.opening + asked.content + opening).ids

    def _right(self, word: str) -> list[int]:
        return self._tokenizer.encode(ScriptTurn("assistant", word[::-1]).content).ids


def words_of(seed: int) -> tuple[list[str], list[str]]:
    """Those of the traffic, and the held-out ones."""
    samples, held_out = split(TASK, seed)
    return [sample["word"] for sample in samples], [sample["word"] for sample in held_out]


def warmed_up_model(seed: int, steps: int = STEPS) -> "Qwen2ForCausalLM":
    """It answers with the letters of the word in some order: one answer of six is right."""
    model = make_model(seed)
    warm_up(model, shown(TASK, split(TASK, seed)[0], seed), steps)
    return model
