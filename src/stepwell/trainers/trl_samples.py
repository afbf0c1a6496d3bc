"""The samples that TRL is given, which know their group and its staleness.

TRL has one advantage per sample: a row with several (other settings of `advantage`, `credit`) becomes several.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np

from stepwell.steps.step import BoolArray, FloatArray, IntArray
from stepwell.trainers.rows import TrainedRows

Message: TypeAlias = dict[str, str]

ARRAYS = {"input_ids": np.int32, "completion_mask": np.int32, "old_log_probs": np.float32}
"""A sample's arrays, and their types in a checkpoint."""


class SampleNumber(int):
    """A group's number, which TRL reads, and the sample's place in the group, which comes back from TRL's collator."""

    place: int

    def __new__(cls, group: int, place: int) -> Self:
        number = super().__new__(cls, group)
        number.place = place
        return number


@dataclass(slots=True)
class PolicyVersions:
    """The engines' weights, as TRL numbers them and as the pool does."""

    trl: int = 0
    pool: int = 0


@dataclass(slots=True, eq=False)
class GroupStaleness:
    """How many versions the group's oldest token is behind, when TRL takes the group's first sample.

    TRL drops samples that are too stale, one by one. It is told the same staleness for all samples of a group, so it
    drops a group as a whole or not at all, also if new weights are sent while it takes them.
    """

    oldest: int
    """The pool's version of the weights that sampled the oldest token."""
    versions: PolicyVersions
    found: int | None = None

    def model_version(self) -> int:
        """TRL's number of a version that is behind its newest one by so many."""
        if self.found is None:
            self.found = self.versions.pool - self.oldest
        return self.versions.trl - self.found


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutSample:
    """One row, with the attributes of TRL's class of the same name; the three arrays have one entry per token."""

    input_ids: IntArray
    completion_mask: IntArray
    """1 for trained tokens."""
    old_log_probs: FloatArray
    advantage: float
    group_id: SampleNumber
    staleness: GroupStaleness
    enqueued_at: float
    prompt: tuple[Message, ...] = ()
    """Messages that TRL displays; empty, because the pool stores tokens."""
    completion: tuple[Message, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the sample, always empty: the logged metrics count rollouts, not samples."""

    @property
    def model_version(self) -> int:
        return self.staleness.model_version()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowSample:
    """The tokens of a row up to the last one with this advantage; arrays have one entry per token."""

    row: int
    """The number of the row among the merged ones."""
    tokens: IntArray
    trained: BoolArray
    """Which tokens have the advantage; the others are context."""
    logprobs: FloatArray
    advantage: float


def row_samples(rows: TrainedRows) -> Iterator[RowSample]:
    """One sample per trained row and advantage in it, in the order of the batch."""
    merged, places = rows.merged, np.flatnonzero(rows.trained)
    advantages, bounds_R = rows.advantages[places], np.searchsorted(places, merged.offsets_R).tolist()
    starts_R = merged.offsets_R.tolist()
    for row in np.sort(rows.chosen_R).tolist():
        start, own = starts_R[row], slice(bounds_R[row], bounds_R[row + 1])
        places_here, advantages_here = places[own], advantages[own]
        is_one = bool((advantages_here == advantages_here[0]).all())
        for advantage in advantages_here[:1] if is_one else np.unique(advantages_here):
            places_of = places_here if is_one else places_here[advantages_here == advantage]
            here = slice(start, int(places_of[-1]) + 1)
            trained = rows.trained[here].copy()
            if not is_one:
                trained[:] = False
                trained[places_of - start] = True
            yield RowSample(
                row=row,
                tokens=merged.tokens[here],
                trained=trained,
                logprobs=merged.logprobs[here],
                advantage=float(advantage),
            )


def packed(sample: RolloutSample) -> dict[str, Any]:
    """The sample for a checkpoint in JSON."""
    arrays = {name: getattr(sample, name).astype(kind) for name, kind in ARRAYS.items()}
    return {
        "advantage": sample.advantage,
        **{name: b64encode(array.tobytes()).decode() for name, array in arrays.items()},
    }


def unpacked(
    values: Mapping[str, Any], number: SampleNumber, staleness: GroupStaleness, enqueued_at: float
) -> RolloutSample:
    arrays: dict[str, Any] = {name: np.frombuffer(b64decode(values[name]), kind) for name, kind in ARRAYS.items()}
    return RolloutSample(
        **arrays, advantage=values["advantage"], group_id=number, staleness=staleness, enqueued_at=enqueued_at
    )
