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
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from stepwell.errors import StepwellError
from stepwell.pool.client import DataPool
from stepwell.steps.running_statistics import NO_PAST, RunningStatistics, statistics_of
from stepwell.trainers.checkpoint import TrainedLedger
from stepwell.trainers.trl_samples import GroupStaleness, PolicyVersions, RolloutSample, SampleNumber, packed, unpacked


@dataclass(slots=True, eq=False, kw_only=True)
class DeliveredGroup:
    leases: tuple[tuple[str, str], ...]
    """Empty once it is committed."""
    uids: tuple[str, ...]
    statistics: RunningStatistics
    """Of the rewards up to this group."""
    samples: list[RolloutSample]
    trained: set[int] = field(default_factory=set)
    """The places of the samples that are trained."""

    @property
    def is_trained(self) -> bool:
        return len(self.trained) == len(self.samples)

    @property
    def is_begun(self) -> bool:
        """Its other samples must be in the checkpoint, which has some already."""
        return bool(self.trained) or not self.leases


class TrlProgress:
    """Used by the thread that fetches groups and by that in which TRL trains."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._delivered: dict[int, DeliveredGroup] = {}
        """Those that are not settled, by their number, the oldest first."""
        self._settled: list[DeliveredGroup] = []
        """Those that are not committed."""
        self._collated: deque[list[SampleNumber]] = deque()
        """The micro-batches that are not trained yet."""
        self._newest_trained = -1
        self._uids: set[str] = set()
        """Of the groups that are not committed."""
        self._ledger = TrainedLedger()
        self._statistics = NO_PAST
        """Of the rewards of all that is settled or begun."""

    # -- what TRL has done ---------------------------------------------------------------------------------------------

    def add(self, number: int, group: DeliveredGroup) -> None:
        with self._lock:
            self._delivered[number] = group
            self._uids.update(group.uids)

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
                if group.is_begun:
                    self._statistics = group.statistics
                break
            self._statistics = group.statistics
            group.samples.clear()
            self._settled.append(self._delivered.pop(number))

    # -- what is known -------------------------------------------------------------------------------------------------

    def __contains__(self, uid: object) -> bool:
        """Whether TRL was given this rollout, or its checkpoint contains it."""
        return uid in self._uids or uid in self._ledger

    @property
    def statistics(self) -> RunningStatistics:
        return self._statistics

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint of the weights as they are now, in JSON's types."""
        with self._lock:
            self._settle()
            trained = [*self._settled, *self._begun()]
            return {
                "leases": [*self._ledger.leases, *(lease for group in trained for lease in group.leases)],
                "trajectories": [*self._ledger.trained, *(uid for group in trained for uid in group.uids)],
                "statistics": self._statistics.as_numbers(),
                "begun": [
                    {
                        "staleness": group.samples[0].staleness.found or 0,
                        "samples": [
                            packed(sample) for sample in group.samples if sample.group_id.place not in group.trained
                        ],
                    }
                    for group in self._begun()
                ],
            }

    def restore(self, state: Mapping[str, Any], pool: DataPool, versions: PolicyVersions) -> list[RolloutSample]:
        """Continue from a checkpoint; acknowledges what it contains. Returns the samples of a begun group that TRL has
        not trained, which have the number 0."""
        self._ledger = TrainedLedger(state["leases"], state["trajectories"])
        self._statistics = statistics_of(state["statistics"])
        self._ledger.acknowledge(pool)
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
            self.add(0, DeliveredGroup(leases=(), uids=(), statistics=self._statistics, samples=samples))
        return samples

    def commit(self, pool: DataPool) -> None:
        """The weights are kept as they were when `state` or `train` was called last: acknowledge what they contain."""
        with self._lock:
            for group in (*self._settled, *self._begun()):
                self._ledger.add(group.leases, group.uids)
                self._uids.difference_update(group.uids)
                group.leases = group.uids = ()
            self._settled.clear()
        if self._ledger.leases:
            self._ledger.acknowledge(pool)

    def close(self, pool: DataPool) -> None:
        """Return what is not committed to the pool."""
        if self._ledger.leases:
            self._ledger.acknowledge(pool)
        for group in (*self._settled, *self._delivered.values()):
            with suppress(StepwellError):  # it returns by itself
                pool.nack(group)
        self._settled, self._delivered = [], {}

    def _begun(self) -> list[DeliveredGroup]:
        return [group for group in self._delivered.values() if group.is_begun]
