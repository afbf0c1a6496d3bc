"""The groups that TRL is given: their samples, what of them is in TRL's weights, and what of that is in its
checkpoints.
- TRL has one advantage per sample: a row with several (other settings of `advantage`, `credit`) becomes several.
- TRL collates micro-batches before it trains them, and takes samples before it collates them. Only what it has trained
  counts.
- A group is settled when all of its samples are trained, or when a later one is: then TRL has dropped the rest.
- A lease is acknowledged when its group is committed: in a checkpoint on disk, or, without checkpoints, in the weights.
- At most one group is begun: some of its samples are trained. A checkpoint contains the others, which TRL is given
  again after a resume, so the group is committed too.
- What a resumed run gets again although it is in the checkpoint is known by the names of its rollouts.
"""

import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any, Self, TypeAlias

import numpy as np

from stepwell.steps.step import BoolArray, FloatArray, IntArray
from stepwell.trainers.feed import Feed, FeedState, LeasedRollouts
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


@dataclass(slots=True, eq=False, kw_only=True)
class DeliveredGroup:
    rollouts: LeasedRollouts | None
    """None once the group counts as trained in the feed: the checkpoint has it."""
    samples: list[RolloutSample]
    trained: set[int] = field(default_factory=set)
    """The places of the samples that are trained."""

    @property
    def is_trained(self) -> bool:
        return len(self.trained) == len(self.samples)

    @property
    def is_begun(self) -> bool:
        """Whether the checkpoint has some of the group's samples already, so that the others must be in it too."""
        return bool(self.trained) or self.rollouts is None


class TrlProgress:
    """The progress of the groups that TRL was given. The thread that fetches groups uses it, and that in which TRL
    trains."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lock = Lock()
        self._delivered: dict[int, DeliveredGroup] = {}
        """The groups that are not settled, by their number, the oldest first."""
        self._collated: deque[list[SampleNumber]] = deque()
        """The micro-batches that are not trained yet."""
        self._newest_trained = -1

    # -- what TRL has done ---------------------------------------------------------------------------------------------

    def add(self, number: int, group: DeliveredGroup) -> None:
        with self._lock:
            self._delivered[number] = group

    def collate(self, samples: Iterable[SampleNumber]) -> None:
        """TRL has made a micro-batch of these."""
        self._collated.append(list(samples))

    def train(self) -> None:
        """TRL has trained the oldest micro-batch that it had collated."""
        samples = self._collated.popleft()
        with self._lock:
            for sample in samples:
                self._delivered[sample].trained.add(sample.place)
            self._newest_trained = max(self._newest_trained, *samples)
            self._settle()

    def _settle(self) -> None:
        for number, group in list(self._delivered.items()):
            if not (group.is_trained or number < self._newest_trained):
                break
            self._count(group)
            del self._delivered[number]

    def _count(self, group: DeliveredGroup) -> None:
        if group.rollouts is not None:
            self._feed.count_as_trained(group.rollouts)
            group.rollouts = None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint of the weights as they are now, in JSON's types."""
        with self._lock:
            self._settle()
            begun = [group for group in self._delivered.values() if group.is_begun]
            state = self._feed.state(*(group.rollouts for group in begun if group.rollouts is not None))
            rest = [
                {
                    "staleness": group.samples[0].staleness.found or 0,
                    "samples": [
                        packed(sample) for sample in group.samples if sample.group_id.place not in group.trained
                    ],
                }
                for group in begun
            ]
            return {**asdict(state), "begun": rest}

    def restore(self, state: Mapping[str, Any], versions: PolicyVersions) -> list[RolloutSample]:
        """Continue from a checkpoint; acknowledges what it contains. Returns the samples of a begun group that TRL has
        not trained, which have the number 0."""
        self._feed.restore(FeedState(**{name: state[name] for name in ("leases", "trajectories", "statistics")}))
        self._feed.acknowledge()
        samples = [
            unpacked(
                values,
                SampleNumber(0, place),
                GroupStaleness(0, versions, found=begun["staleness"]),
                enqueued_at=time.time(),
            )
            for begun in state["begun"]
            for place, values in enumerate(begun["samples"])
        ]
        if samples:
            self.add(0, DeliveredGroup(rollouts=None, samples=samples))
        return samples

    def commit(self) -> None:
        """The weights are kept as they were when `state` or `train` was called last: acknowledge what they contain."""
        with self._lock:
            for group in self._delivered.values():
                if group.is_begun:
                    self._count(group)
        self._feed.acknowledge()

    def close(self) -> None:
        """Return what is not committed to the pool."""
        self._delivered = {}
        self._feed.give_back(also_trained=True)
        self._feed.acknowledge()
