"""The pool's statistics.

- submitted = accepted + quarantined + refused.
- Per channel, accepted = held + shipped + left out + dropped. Every step that leaves the pool is counted under a cause.
  A step under lease counts as held until it is acknowledged, or, if single steps are leased, until its trajectory is
  dropped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from stepwell.common.message_format import message
from stepwell.pool.api.producing import TRAIN
from stepwell.steps.trainable import SAMPLING_KINDS, sampling_note


@message
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


@message
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
    recent: Counter[str] = field(default_factory=Counter, compare=False)
    """The last accepted steps by what in their sampling keeps them from training; empty for nothing. It begins anew
    when the shard restarts, so it is no part of a comparison."""

    def sampling_note(self, channel: str) -> str | None:
        """In words, if many of the last steps are left out for their sampling. Other channels than TRAIN may be for
        evaluation: of these it is said after a trainer has left such steps out."""
        is_trained = channel == TRAIN or not SAMPLING_KINDS.keys().isdisjoint(self.left_out)
        return sampling_note(channel, self.recent) if is_trained else None


@message
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
    """Judgements that gave no reward, by outcome: error, timeout, abstained."""
    late: int
    """Judgements that came too late: the trajectory was scored, changed, dropped or offered again before."""
    abstained_steps: int = 0
    """Steps to which a judgement gave no reward for want of evidence."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveStats:
    """Trained groups on their way to the archive; all 0 where there is none."""

    waiting_groups: int = 0
    waiting_bytes: int = 0
    """Of tokens, log-probabilities and masks, as stored."""
    files: int = 0
    """Written since the shard's start."""
    failures: int = 0
    """Attempts to write that failed, since the shard's start. Each is repeated."""
    dropped_groups: int = 0
    """Groups that will never be in the archive, because too many waited; since the shard's start."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Conversations of live users; all 0 where there are none."""

    open: int = 0
    ended_idle: int = 0
    """Trajectories that were completed because their session had no call for --session-idle seconds."""
    deferred: int = 0
    """Groups, trajectories or steps that were old enough for a batch and were left in the queue because of
    --max-share-per-user; counted once for each such batch."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    policy_version: int
    channels: Mapping[str, ChannelStats]
    submitted: int
    refused: Counter[str]
    """Refused steps, by the value of their SubmitVerdict."""
    quarantined: Counter[str]
    """Steps by kind of fault."""
    in_grace: int
    """Accepted steps whose calls were in flight when their trajectory was completed."""
    uniform_groups: int
    """Groups of several rollouts that were handed out and in which all rollouts are the same, token by token."""
    unfinished: int = 0
    """Rollouts that were completed as failures because they were open at their group's deadline."""
    decided: Counter[str] = field(default_factory=Counter)
    """Decisions about versions of the policy, by action."""
    marked: Counter[str] = field(default_factory=Counter)
    """What was told of who read a step: unseen, read, not_continued, continued. What came after its step was trained or
    dropped is `late`."""
    short_of_disk: int = 0
    """Shards that take no new data because their journal's disk is nearly full."""
    removal_waits: int = 0
    """Shards that cannot remove for good what they are to remove, because of a lack of space, for example. Their log
    says why. They try again."""
    overdue_by_clock: int = 0
    """Trajectories that the retention keeps, though they are too old by the wall clock: the pool has not run for so
    long since they came."""
    leases: int
    forks: int
    """How often a step did not continue its trajectory's earlier tokens."""
    scoring: ScoringStats
    archiving: ArchiveStats = ArchiveStats()
    sessions: SessionStats = SessionStats()
    shards: int = 1
    """Shards that run, also those that do not answer, and those that are to go."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer, and are not counted."""


def merge_stats(parts: Sequence[PoolStats], missing: tuple[str, ...] = ()) -> PoolStats:
    """The statistics of a pool from those of its shards."""
    merged: PoolStats = _sum(parts)
    version, shards = max(part.policy_version for part in parts), merged.shards + len(missing)
    return replace(merged, policy_version=version, shards=shards, missing=missing)


def _sum(parts: Sequence[Any]) -> Any:
    """Numbers and counts are added, mappings name by name, statistics field by field."""
    kind = type(parts[0])
    if kind is dict:
        names = sorted({name for part in parts for name in part})
        return {name: _sum([part[name] for part in parts if name in part]) for name in names}
    if kind in (PoolStats, ChannelStats, ScoringStats, ArchiveStats, SessionStats):
        return kind(**{one.name: _sum([getattr(part, one.name) for part in parts]) for one in fields(kind)})
    return sum(parts, kind())
