"""What the demo's model can be taught, in one table."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from stepwell.demo.reversing import Reversing
from stepwell.demo.tool_calling import ToolCalling
from stepwell.demo.vocabulary import Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Sample: TypeAlias = Mapping[str, str]

HELD_OUT = 64
"""Samples that neither the warm-up nor the training sees."""


class Task(Protocol):
    @property
    def updates(self) -> int:
        """After so many the model has learned it."""

    def samples(self) -> Sequence[Sample]: ...

    def shown(self, sample: Sample, chance: random.Random) -> Sequence[Turn]:
        """The sample as the warm-up shows it, right or wrong."""

    async def play(self, client: "AsyncOpenAI", sample: Sample) -> float:
        """The agent: it knows an OpenAI client, and nothing of Stepwell. Gives the reward, 0 or 1."""


TASKS: Mapping[str, Task] = {"rev": Reversing(), "tool": ToolCalling()}


def split(task: Task, seed: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The samples to train on, and those held out."""
    samples = list(task.samples())
    random.Random(seed).shuffle(samples)
    return samples[HELD_OUT:], samples[:HELD_OUT]


def shown(task: Task, samples: Sequence[Sample], seed: int) -> Iterator[Sequence[Turn]]:
    """The warm-up's conversations, without end."""
    chance = random.Random(seed)
    while True:
        yield task.shown(chance.choice(samples), chance)
