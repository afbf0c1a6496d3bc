"""The samples that rollouts start from, in a seeded order, epoch after epoch.

- An epoch has every sample once. The same seed gives the same order.
- A position names the next sample; a run that continues from it repeats none.
- Each sample gets a group name of its own, from which `find` gets the sample again if the pool wants more rollouts.
"""

import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import orjson

from stepwell.agents.rollout import Sample
from stepwell.errors import BadRequest


class Samples(Protocol):
    """Samples by number: a list, or a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sample, and the name of the group of its rollouts."""

    uid: str
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a run in its dataset; plain values, easy to store."""

    run: str
    epoch: int = 0
    place: int = 0
    """Place of the next sample in the epoch's order."""


class Dataset:
    """Iteration continues at its position."""

    def __init__(
        self,
        source: str | Path | Samples | Iterable[Sample],
        *,
        seed: int | None = 0,
        epochs: int | None = None,
        position: Position | None = None,
    ) -> None:
        """`source`: a JSONL file, or samples; an iterable is read to its end at once. Without a seed the order is kept;
        without `epochs` the dataset repeats without end."""
        self._samples = _samples(source)
        if len(self._samples) == 0:
            raise BadRequest(f"there is no sample in {source}")
        self._seed = seed
        self._epochs = epochs
        self._position = position or Position(run=secrets.token_hex(4))
        self._process_tag = secrets.token_hex(2)
        """Makes group names differ from those that the same run gave before it was resumed."""
        self._order: tuple[int, Sequence[int]] | None = None

    @property
    def position(self) -> Position:
        return self._position

    @property
    def left(self) -> int | None:
        """Samples still to come; None without a last epoch."""
        here = self._position
        return None if self._epochs is None else max(0, (self._epochs - here.epoch) * len(self) - here.place)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._samples)

    def __iter__(self) -> Iterator[Prompt]:
        while self._epochs is None or self._position.epoch < self._epochs:
            yield self._take()

    def rest_of_epoch(self) -> list[Prompt]:
        """All samples up to the end of the current epoch."""
        return [self._take() for _ in range(self._position.place, len(self))]

    def find(self, prompt_uid: str) -> Prompt | None:
        """The sample of a group of this run, also of one from before it was resumed."""
        run, _, rest = prompt_uid.partition(":")
        index = rest.partition(":")[0]
        if run != self._position.run or not index.isdecimal() or int(index) >= len(self):
            return None
        return Prompt(prompt_uid, self._samples[int(index)])

    def _take(self) -> Prompt:
        here = self._position
        index = self._order_of(here.epoch)[here.place]
        is_last = here.place + 1 == len(self)
        self._position = Position(run=here.run, epoch=here.epoch + is_last, place=0 if is_last else here.place + 1)
        return Prompt(f"{here.run}:{index}:{here.epoch}:{self._process_tag}", self._samples[index])

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._order is None or self._order[0] != epoch:
            places = range(len(self))
            shuffled = (
                places if self._seed is None else random.Random(f"{self._seed}:{epoch}").sample(places, len(self))
            )
            self._order = epoch, shuffled
        return self._order[1]


def _samples(source: str | Path | Samples | Iterable[Sample]) -> Samples:
    if isinstance(source, str | Path):
        return _read_jsonl(Path(source))
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return cast("Samples", source)
    return list(source)


def _read_jsonl(path: Path) -> list[Sample]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as failure:
        raise BadRequest(f"the dataset cannot be read: {failure}") from None
    return [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _read_line(path: Path, number: int, line: bytes) -> Sample:
    try:
        sample = orjson.loads(line)
    except ValueError as failure:
        raise BadRequest(f"{path}, line {number}, is not JSON: {failure}") from None
    if not isinstance(sample, dict):
        raise BadRequest(f"{path}, line {number}, is a {type(sample).__name__}; a sample is a JSON object")
    return sample
