"""The pool's statistics.

- submitted = accepted + quarantined + refused.
- Per channel, accepted = held + shipped + left out + dropped. Every step that leaves the pool is counted under a cause.
  A step under lease counts as held until it is acknowledged, or, if single steps are leased, until its trajectory is
  dropped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StepCount:
    """A number of steps and their tokens."""

    steps: int = 0
    tokens: int = 0

    def add(self, steps: int, tokens: int) -> None:
        self.steps += steps
        self.tokens += tokens

    def __add__(self, other: "StepCount") -> "StepCount":
        return StepCount(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, other: "StepCount") -> "StepCount":
        return StepCount(self.steps - other.steps, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    groups: int
    ready_groups: int
    ready_by_source: Counter[str]
    """The same, by where they come from."""
    trajectories: int
    """Registered and not yet taken or dropped."""
    nbytes: int
    """Of tokens, log-probabilities and masks, as stored."""
    history_groups: int
    held: StepCount
    """Steps under lease included."""
    accepted: StepCount
    shipped: StepCount
    dropped: Mapping[str, StepCount]
    """By cause."""
    left_out: Mapping[str, StepCount]
    """By kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringStats:
    """The work of reward workers; all 0 where no reward is required."""

    waiting: int
    """Trajectories without a reward that a worker can take."""
    under_way: int
    """Trajectories that a worker has."""
    resting: int
    """An attempt to score them failed; they are offered again after a pause."""
    scored: int
    """Judgements that became a reward."""
    failed: Counter[str]
    """Judgements that failed, by outcome: error, timeout."""
    late: int
    """Judgements that came too late: the trajectory was scored, changed, dropped or offered again before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    policy_version: int
    channels: Mapping[str, ChannelStats]
    submitted: int
    refused: Counter[str]
    """Steps by cause: duplicate, late, unknown, mixed_indexes, full."""
    quarantined: Counter[str]
    """Steps by kind of fault."""
    leases: int
    forks: int
    """How often a step did not continue its trajectory's earlier tokens."""
    scoring: ScoringStats


def merge_stats(parts: Sequence[PoolStats]) -> PoolStats:
    """The statistics of a pool from those of its shards."""
    names = sorted({name for part in parts for name in part.channels})
    return PoolStats(
        policy_version=max(part.policy_version for part in parts),
        channels={name: _merge_channel([p.channels[name] for p in parts if name in p.channels]) for name in names},
        submitted=sum(part.submitted for part in parts),
        refused=sum((part.refused for part in parts), Counter()),
        quarantined=sum((part.quarantined for part in parts), Counter()),
        leases=sum(part.leases for part in parts),
        forks=sum(part.forks for part in parts),
        scoring=_merge_scoring([part.scoring for part in parts]),
    )


def _merge_channel(parts: Sequence[ChannelStats]) -> ChannelStats:
    return ChannelStats(
        groups=sum(part.groups for part in parts),
        ready_groups=sum(part.ready_groups for part in parts),
        ready_by_source=sum((part.ready_by_source for part in parts), Counter()),
        trajectories=sum(part.trajectories for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        history_groups=sum(part.history_groups for part in parts),
        held=sum((part.held for part in parts), StepCount()),
        accepted=sum((part.accepted for part in parts), StepCount()),
        shipped=sum((part.shipped for part in parts), StepCount()),
        dropped=_merge_counts([part.dropped for part in parts]),
        left_out=_merge_counts([part.left_out for part in parts]),
    )


def _merge_scoring(parts: Sequence[ScoringStats]) -> ScoringStats:
    return ScoringStats(
        waiting=sum(part.waiting for part in parts),
        under_way=sum(part.under_way for part in parts),
        resting=sum(part.resting for part in parts),
        scored=sum(part.scored for part in parts),
        failed=sum((part.failed for part in parts), Counter()),
        late=sum(part.late for part in parts),
    )


def _merge_counts(parts: Sequence[Mapping[str, StepCount]]) -> dict[str, StepCount]:
    names = sorted({name for part in parts for name in part})
    return {name: sum((part.get(name, StepCount()) for part in parts), StepCount()) for name in names}
