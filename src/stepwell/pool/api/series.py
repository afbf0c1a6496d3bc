"""Time series of the pool: what happened in each interval of time, per channel, and how shards' series are merged.

Percentiles are merged as a weighted mean: good enough for a chart, not exact.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from stepwell.common.message_format import message

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
            name: channel_series([_merge([part.get(name, EMPTY) for part in by_end[end]]) for end in ends])
            for name in names
        },
        missing=missing,
    )


def merge_consecutive(buckets: Sequence[Bucket]) -> Bucket:
    """One bucket of intervals that follow one another. What is held is what is held at the end."""
    last = buckets[-1]
    return _sum(buckets)._replace(groups=last.groups, ready_groups=last.ready_groups, oldest_age=last.oldest_age)


def channel_series(buckets: Sequence[Bucket]) -> ChannelSeries:
    causes = sorted({cause for bucket in buckets for cause in bucket.dropped_tokens})
    columns: dict[str, Any] = {name: [getattr(bucket, name) for bucket in buckets] for name in Bucket._fields}
    columns["dropped_tokens"] = {cause: [b.dropped_tokens.get(cause, 0) for b in buckets] for cause in causes}
    return ChannelSeries(**columns)


def _merge(shards: Sequence[Bucket]) -> Bucket:
    return _sum(shards) if len(shards) != 1 else shards[0]


def _sum(buckets: Sequence[Bucket]) -> Bucket:
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
