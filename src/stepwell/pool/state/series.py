"""The pool's time series in two ring buffers: an hour in steps of 5 seconds, a day in steps of a minute.

- Steps and tokens are differences of the ledgers, taken when an interval ends: a step costs nothing here. Rewards and
  staleness are added once per trajectory, when it is acknowledged.
- Intervals end at multiples of their length, so that those of several shards fit together. What happened between two
  messages belongs to the time of the first.
- The series are kept in memory: a shard that restarts begins new ones.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.pool.api.staleness import versions_behind
from stepwell.pool.api.stats import COARSE, EMPTY, FINE, Bucket, Interval, SeriesChunk, merge_consecutive
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.ledger import Ledger

FINE_KEPT, COARSE_KEPT = 720, 1_440
SAMPLES = 4_096
"""Percentiles of an interval are computed from its last rewards, at most this many."""


@dataclass(slots=True)
class Accumulator:
    """The trajectories of one channel that are acknowledged in the running interval."""

    count: int = 0
    total: float = 0.0
    rewards: list[float] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)

    def add(self, trained: TrajectorySnapshot, version: int) -> None:
        """A trajectory that was handed out when the policy had that version."""
        reward = trained.reward
        if trained.oldest_version is not None:
            behind = versions_behind(trained.oldest_version, version)
            self.staleness[behind] = self.staleness.get(behind, 0) + 1
        if reward is None:
            return
        if self.count < SAMPLES:
            self.rewards.append(reward)
        else:
            self.rewards[self.count % SAMPLES] = reward
        self.count += 1
        self.total += reward


class SeriesRecorder:
    def __init__(self, channels: Mapping[str, Channel]) -> None:
        self._channels = channels
        self._fine: deque[Interval] = deque(maxlen=FINE_KEPT)
        self._coarse: deque[Interval] = deque(maxlen=COARSE_KEPT)
        self._minute: list[Interval] = []
        """The fine intervals of the running coarse one."""
        self._end = 0.0
        """The end of the running fine interval; 0 before the first."""
        self._before: dict[str, Bucket] = {}
        """The totals of the ledgers when it began."""
        self._trained: dict[str, Accumulator] = {}

    def tick(self, now: float) -> None:
        """Let time pass. Nearly always this is a single comparison."""
        if now < self._end:
            return
        if self._end == 0.0:
            self._before = {name: ledger_totals(channel.ledger) for name, channel in self._channels.items()}
            self._end = _end_of(now, FINE)
            return
        self._close()
        kept = COARSE * COARSE_KEPT
        if now - self._end > kept:  # there was no call for a day
            self._end = _end_of(now - kept, FINE)
        while now >= self._end:
            self._close()

    def trained(self, channel: str) -> Accumulator:
        """Collects what is acknowledged in the running interval."""
        if channel not in self._trained:
            self._trained[channel] = Accumulator()
        return self._trained[channel]

    def chunk(self, seconds: float) -> SeriesChunk:
        """The last `seconds`, in the finest intervals that reach so far back."""
        if self._end == 0.0:
            return SeriesChunk(FINE, [])
        running: Interval = (self._end, self._buckets())
        if seconds <= FINE * FINE_KEPT:
            return SeriesChunk(FINE, _last([*self._fine, running], seconds / FINE))
        minute: Interval = (_end_of(self._end - FINE, COARSE), _merge([*self._minute, running]))
        return SeriesChunk(COARSE, _last([*self._coarse, minute], seconds / COARSE))

    def _close(self) -> None:
        """End the running interval."""
        ended: Interval = (self._end, self._buckets())
        self._fine.append(ended)
        self._minute.append(ended)
        if self._end % COARSE == 0.0:
            self._coarse.append((self._end, _merge(self._minute)))
            self._minute = []
        self._before = {name: ledger_totals(channel.ledger) for name, channel in self._channels.items()}
        self._trained.clear()
        self._end += FINE

    def _buckets(self) -> dict[str, Bucket]:
        buckets = ((name, self._bucket(name, channel)) for name, channel in self._channels.items())
        return {name: bucket for name, bucket in buckets if bucket != EMPTY}

    def _bucket(self, name: str, channel: Channel) -> Bucket:
        before, now = self._before.get(name, EMPTY), ledger_totals(channel.ledger)
        trained, oldest = self._trained.get(name, Accumulator()), channel.oldest()
        low, high = _percentiles(trained.rewards)
        return Bucket(
            steps=now.steps - before.steps,
            tokens=now.tokens - before.tokens,
            trained_steps=now.trained_steps - before.trained_steps,
            trained_tokens=now.trained_tokens - before.trained_tokens,
            rewards=trained.count,
            reward_mean=trained.total / trained.count if trained.count else None,
            reward_low=low,
            reward_high=high,
            staleness=dict(trained.staleness),
            groups=len(channel),
            ready_groups=len(channel.ready),
            oldest_age=0.0 if oldest is None else max(0.0, self._end - oldest.opened_at),
            dropped_tokens={
                cause: tokens
                for cause, total in now.dropped_tokens.items()
                if (tokens := total - before.dropped_tokens.get(cause, 0))
            },
        )


def ledger_totals(ledger: Ledger) -> Bucket:
    """A ledger's numbers at one moment."""
    lost = {cause: count.tokens for cause, count in ledger.dropped.items()}
    lost |= {f"left out: {kind}": count.tokens for kind, count in ledger.left_out.items()}
    accepted, shipped = ledger.accepted, ledger.shipped
    return Bucket(accepted.steps, accepted.tokens, shipped.steps, shipped.tokens, dropped_tokens=lost)


def _end_of(now: float, length: float) -> float:
    """The end of the interval that contains `now`."""
    return (math.floor(now / length) + 1) * length


def _last(intervals: Sequence[Interval], count: float) -> Sequence[Interval]:
    return intervals[-max(1, math.ceil(count)) :]


def _merge(intervals: Sequence[Interval]) -> dict[str, Bucket]:
    """Consecutive intervals as one."""
    names = {name: None for _, buckets in intervals for name in buckets}
    return {name: merge_consecutive([buckets.get(name, EMPTY) for _, buckets in intervals]) for name in names}


def _percentiles(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """The 10th and the 90th."""
    if not rewards:
        return None, None
    ordered = sorted(rewards)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]
