"""Which groups TRL was given, what of them is in its weights, and what of that is in its checkpoints.

Invariants:
- TRL collates micro-batches before it trains them, and takes samples before it collates them. Only what it has trained
  counts.
- A group is settled when all of its samples are trained, or when a later one is: then TRL has dropped the rest.
- A lease is acknowledged when its group is committed: in a checkpoint on disk, or, without checkpoints, in the weights.
- At most one group is begun: some of its samples are trained. A checkpoint contains the others, which TRL is given
  again after a resume, so the group is committed too.
- What a resumed run gets again although it is in the checkpoint is known by the names of its rollouts.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

from stepwell.trainers.feed import Feed, FeedState, LeasedRollouts
from stepwell.trainers.trl_groups import GroupStaleness, PolicyVersions, RolloutSample, SampleNumber, packed, unpacked


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
