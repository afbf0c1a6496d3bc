"""The pool's statistics, and its time series: what happened in each interval of time, per channel.

- submitted = accepted + quarantined + refused.
- Per channel, accepted = held + shipped + left out + dropped. Every step that leaves the pool is counted under a cause.
  A step under lease counts as held until it is acknowledged, or, if single steps are leased, until its trajectory is
  dropped.
- Percentiles of several shards are merged as a weighted mean: good enough for a chart, not exact.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeAlias

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
    """Bytes of memory that the queued groups take: stored data, metadata and records."""
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
    """Bytes of memory that the waiting groups take, counted as in ChannelStats."""
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


FINE, COARSE = 5.0, 60.0
"""The two lengths of intervals, in seconds."""


@message
class Bucket(NamedTuple):
    """One channel in one interval. The fields are those of ChannelSeries."""

    steps: int = 0
    tokens: int = 0
    trained_steps: int = 0
    trained_tokens: int = 0
    rewards: int = 0
    reward_mean: float | None = None
    reward_low: float | None = None
    reward_high: float | None = None
    staleness: Mapping[int, int] = {}
    groups: int = 0
    ready_groups: int = 0
    oldest_age: float = 0.0
    dropped_tokens: Mapping[str, int] = {}


EMPTY = Bucket()
ADDED = ("steps", "tokens", "trained_steps", "trained_tokens", "rewards", "groups", "ready_groups")
AVERAGED = ("reward_mean", "reward_low", "reward_high")
"""The fields that are added up, and those whose mean is taken, by the number of rewards."""
Interval: TypeAlias = tuple[float, Mapping[str, Bucket]]
"""The time at which it ends, and its buckets by channel. Empty buckets are left out."""


@message
class SeriesChunk(NamedTuple):
    """One shard's intervals, oldest first. The last one is still running."""

    length: float
    intervals: Sequence[Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSeries:
    """A channel's history, one value per interval, oldest first."""

    steps: Sequence[int]
    """Accepted in the interval."""
    tokens: Sequence[int]
    trained_steps: Sequence[int]
    """Acknowledged in the interval."""
    trained_tokens: Sequence[int]
    rewards: Sequence[int]
    """Number of trajectories with a reward that were acknowledged."""
    reward_mean: Sequence[float | None]
    reward_low: Sequence[float | None]
    """The 10th percentile of the rewards; `reward_high` is the 90th. Several shards: the mean of theirs."""
    reward_high: Sequence[float | None]
    staleness: Sequence[Mapping[int, int]]
    """Number of acknowledged trajectories, by how many versions behind they were when they were handed out."""
    groups: Sequence[int]
    """At the end of the interval, as are the next two."""
    ready_groups: Sequence[int]
    oldest_age: Sequence[float]
    """Seconds since the oldest held group was opened; 0 without any."""
    dropped_tokens: Mapping[str, Sequence[int]]
    """By cause. Tokens that a trainer's step filter left out stand under "left out: KIND"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeries:
    interval: float
    ends: Sequence[float]
    """Wall-clock seconds at which each interval ends. The last one is still running."""
    channels: Mapping[str, ChannelSeries]
    missing: tuple[str, ...] = ()
    """Shards that did not answer, and are not counted."""


def merge_chunks(chunks: Sequence[SeriesChunk], missing: tuple[str, ...] = ()) -> TimeSeries:
    """The pool's series from its shards' chunks. It ends with the first chunk to end, because what is held is known
    only where all shards report it."""
    filled = [chunk for chunk in chunks if chunk.intervals]
    if not filled:
        return TimeSeries(interval=FINE, ends=[], channels={}, missing=missing)
    last_end = min(chunk.intervals[-1][0] for chunk in filled)
    by_end: dict[float, list[Mapping[str, Bucket]]] = {}
    for chunk in filled:
        for end, buckets in chunk.intervals:
            if end <= last_end:
                by_end.setdefault(end, []).append(buckets)
    ends = sorted(by_end)
    names = sorted({name for parts in by_end.values() for buckets in parts for name in buckets})
    return TimeSeries(
        interval=filled[0].length,
        ends=ends,
        channels={
            name: channel_series([_merge_shards([part.get(name, EMPTY) for part in by_end[end]]) for end in ends])
            for name in names
        },
        missing=missing,
    )


def merge_consecutive(buckets: Sequence[Bucket]) -> Bucket:
    """One bucket of intervals that follow one another. What is held is what is held at the end."""
    last = buckets[-1]
    return _sum_buckets(buckets)._replace(
        groups=last.groups, ready_groups=last.ready_groups, oldest_age=last.oldest_age
    )


def channel_series(buckets: Sequence[Bucket]) -> ChannelSeries:
    causes = sorted({cause for bucket in buckets for cause in bucket.dropped_tokens})
    columns: dict[str, Any] = {name: [getattr(bucket, name) for bucket in buckets] for name in Bucket._fields}
    columns["dropped_tokens"] = {cause: [b.dropped_tokens.get(cause, 0) for b in buckets] for cause in causes}
    return ChannelSeries(**columns)


def _merge_shards(shards: Sequence[Bucket]) -> Bucket:
    return _sum_buckets(shards) if len(shards) != 1 else shards[0]


def _sum_buckets(buckets: Sequence[Bucket]) -> Bucket:
    staleness: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    for bucket in buckets:
        staleness.update(bucket.staleness)
        dropped.update(bucket.dropped_tokens)
    merged: dict[str, Any] = {name: sum([getattr(bucket, name) for bucket in buckets]) for name in ADDED}
    for name in AVERAGED:
        merged[name] = _mean([(getattr(bucket, name), bucket.rewards) for bucket in buckets])
    return Bucket(
        **merged,
        staleness=dict(staleness),
        oldest_age=max((bucket.oldest_age for bucket in buckets), default=0.0),
        dropped_tokens=dict(dropped),
    )


def _mean(weighted: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
