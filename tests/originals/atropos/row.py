"""What the test of one environment needs: its file, what stands in for its data, and what the engine answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from rig.fake_engine.sampling import Reply

Json: TypeAlias = dict[str, Any]
Answer: TypeAlias = Callable[[Json, int], "str | Reply"]
"""The model's answer to a request, and how many choices were answered before: of a request for n choices, each."""
Rows: TypeAlias = Sequence[Json]
Data: TypeAlias = "Rows | Mapping[str, Rows]"
"""The rows of a data set, of every split alike or by split."""


def in_turn(*answers: "str | Reply") -> Answer:
    """So that the scores within a group differ."""
    return lambda request, number: answers[number % len(answers)]


YES_OR_NO = in_turn("yes", "no")


def prompt_of(request: Json) -> str:
    """All that the model is asked, as one text."""
    return str(request.get("prompt") or "\n".join(str(message.get("content")) for message in request["messages"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    file: str
    """Below the folder of environments."""
    answer: Answer = YES_OR_NO
    data: Mapping[str, Data] = field(default_factory=dict)
    """By the name that load_dataset is called with: `name`, or `name:configuration`."""
    tokenizers: Sequence[str] = ()
    """Names for which the tiny tokenizer stands in; that of --env.tokenizer_name is always given."""
    packages: Mapping[str, ModuleType] = field(default_factory=dict)
    """Modules that cannot be installed, with no more than the names that the file uses."""
    prepare: Callable[[Path], None] | None = None
    """Called in the process of the environment, in its empty working folder, before the file runs."""
    command: Literal["serve", "evaluate"] = "serve"
    flags: Sequence[str] = ()
    """Beside those that every environment gets; they come after them. `{engine}` stands for the engine's URL with /v1,
    `{work}` for the working folder, `{tiny}` for the tiny tokenizer's."""
    arguments: Sequence[str] | None = None
    """In place of the command and all flags, for a file with a command line of its own; the same names in braces."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, with the same names in braces."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Files that the distribution lacks, by their path below the folder of the environment's file."""
    models: Sequence[str] = ()
    """Names of models that the file asks for beside --openai.model_name."""
    group_size: int = 4
    batch_size: int | None = None
    """Sequences in the trainer's batch; by default those of one group."""
    only_starts: str = ""
    """Why it makes no group here, though it starts."""
    skip: str = ""
    """Why it cannot run here."""
    timeout: float = 60.0

    @property
    def makes_group(self) -> bool:
        return not (self.skip or self.only_starts) and self.command == "serve" and self.arguments is None
