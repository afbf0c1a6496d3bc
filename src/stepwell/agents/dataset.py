"""The samples that rollouts are made of, in an order that a seed decides, epoch after epoch.

What always holds: an epoch has every sample once; the same seed gives the same order; a position names the place that
comes next, and whoever goes on from it repeats nothing that was handed out. Each sample handed out gets a group name of
its own, from which the sample can be found again: for groups that a pool wants more rollouts of.
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
    """Samples by number: a list, or a dataset of Hugging Face's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sample, and the name of the group that its rollouts form."""

    uid: str
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run through a dataset stands; plain values, to be stored as they are."""

    run: str
    epoch: int = 0
    place: int = 0
    """Within the epoch's order, of the next sample."""


class Dataset:
    """Iterating over it goes on where it stands."""

    def __init__(
        self,
        source: str | Path | Samples | Iterable[Sample],
        *,
        seed: int | None = 0,
        epochs: int | None = None,
        position: Position | None = None,
    ) -> None:
        """`source`: a JSONL file, or samples; an iterable is read to its end at once. A seed of None keeps the order;
        without `epochs` there is no last one."""
        self._samples = _samples(source)
        if len(self._samples) == 0:
            raise BadRequest(f"there is no sample in {source}")
        self._seed = seed
        self._epochs = epochs
        self._position = position or Position(run=secrets.token_hex(4))
        self._life = secrets.token_hex(2)
        """Keeps the names of a run that goes on apart from those it gave before."""
        self._order: tuple[int, Sequence[int]] | None = None

    @property
    def position(self) -> Position:
        return self._position

    @property
    def left(self) -> int | None:
        """Samples still to be handed out; None if there is no last epoch."""
        here = self._position
        return None if self._epochs is None else max(0, (self._epochs - here.epoch) * len(self) - here.place)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._samples)

    def __iter__(self) -> Iterator[Prompt]:
        while self._epochs is None or self._position.epoch < self._epochs:
            yield self._take()

    def rest_of_epoch(self) -> list[Prompt]:
        """All up to the end of the epoch that the position is in."""
        return [self._take() for _ in range(self._position.place, len(self))]

    def find(self, prompt_uid: str) -> Prompt | None:
        """The sample that a group of this run was named for, also before the run was resumed."""
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
        return Prompt(f"{here.run}:{index}:{here.epoch}:{self._life}", self._samples[index])

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
        raise BadRequest(f"{path}, line {number}, is no JSON: {failure}") from None
    if not isinstance(sample, dict):
        raise BadRequest(f"{path}, line {number}, is a {type(sample).__name__}; a sample is a JSON object")
    return sample
