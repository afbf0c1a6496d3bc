"""The pool's own time series, in two ring buffers: an hour in steps of 5 seconds, a day in steps of a minute.

Steps and tokens are differences of the ledgers, taken when an interval ends, so that a step costs nothing here; rewards
and staleness are noted once a rollout, when it is acknowledged. What always holds: intervals end at multiples of their
length, so that those of several shards fit together; what happened between two messages belongs to the first's time.
They are kept in memory: a shard that restarts begins new ones.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepwell.pool.api.series import STILL, Moment, as_window, one_after_another, side_by_side
from stepwell.pool.api.stats import Ledger
from stepwell.pool.api.watching import Series
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.snapshots import Sketch

FINE, FINE_KEPT = 5.0, 720
COARSE, COARSE_KEPT = 60.0, 1_440
SAMPLES = 4_096
"""Rewards of one interval among which percentiles are looked for: the last so many."""

Interval: TypeAlias = tuple[float, Mapping[str, Moment]]
"""When it ends, and what happened in it, by channel."""


class Strip(NamedTuple):
    """What one shard tells of the time that has passed; the last interval is still going."""

    length: float
    intervals: Sequence[Interval]


class Counted(NamedTuple):
    """A ledger's numbers at one moment."""

    steps: int = 0
    tokens: int = 0
    trained_steps: int = 0
    trained_tokens: int = 0
    lost: Mapping[str, int] = {}
    """Tokens dropped and left out, by what the series calls it."""


class Seen:
    """The rollouts of one channel that were acknowledged in the interval that is going."""

    __slots__ = ("count", "rewards", "staleness", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.rewards: list[float] = []
        self.staleness: dict[int, int] = {}

    def add(self, trained: Sketch, version: int) -> None:
        """One that was handed out when the policy was of that version."""
        oldest, reward = trained.oldest_version, trained.reward
        if oldest is not None:
            self.staleness[version - oldest] = self.staleness.get(version - oldest, 0) + 1
        if reward is None:
            return
        if self.count < SAMPLES:
            self.rewards.append(reward)
        else:
            self.rewards[self.count % SAMPLES] = reward
        self.count += 1
        self.total += reward


class Timeline:
    def __init__(self, channels: Mapping[str, Channel]) -> None:
        self._channels = channels
        self._fine: deque[Interval] = deque(maxlen=FINE_KEPT)
        self._coarse: deque[Interval] = deque(maxlen=COARSE_KEPT)
        self._minute: list[Interval] = []
        """The fine intervals of the coarse one that is going."""
        self._end = 0.0
        """Of the fine interval that is going; 0 before the first."""
        self._before: dict[str, Counted] = {}
        """The ledgers when it began."""
        self._seen: dict[str, Seen] = {}

    def tick(self, now: float) -> None:
        """Let time pass; nearly always a single comparison."""
        if now < self._end:
            return
        if self._end == 0.0:
            self._before = {name: count(channel.ledger) for name, channel in self._channels.items()}
            self._end = _end_of(now, FINE)
            return
        self._close()
        kept = COARSE * COARSE_KEPT
        if now - self._end > kept:  # no one has called for a day
            self._end = _end_of(now - kept, FINE)
        while now >= self._end:
            self._close()

    def seen(self, channel: str) -> Seen:
        """Where to note what is acknowledged now."""
        if channel not in self._seen:
            self._seen[channel] = Seen()
        return self._seen[channel]

    def strip(self, seconds: float) -> Strip:
        """The last so many seconds, in the finest steps that reach so far back."""
        if self._end == 0.0:
            return Strip(FINE, [])
        going: Interval = (self._end, self._moments())
        if seconds <= FINE * FINE_KEPT:
            return Strip(FINE, _last([*self._fine, going], seconds / FINE))
        minute: Interval = (_end_of(self._end - FINE, COARSE), _folded([*self._minute, going]))
        return Strip(COARSE, _last([*self._coarse, minute], seconds / COARSE))

    # -- how -----------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """The interval that is going is over."""
        ended: Interval = (self._end, self._moments())
        self._fine.append(ended)
        self._minute.append(ended)
        if self._end % COARSE == 0.0:
            self._coarse.append((self._end, _folded(self._minute)))
            self._minute = []
        self._before = {name: count(channel.ledger) for name, channel in self._channels.items()}
        self._seen.clear()
        self._end += FINE

    def _moments(self) -> dict[str, Moment]:
        found = ((name, self._moment(name, channel)) for name, channel in self._channels.items())
        return {name: moment for name, moment in found if moment != STILL}

    def _moment(self, name: str, channel: Channel) -> Moment:
        then, now, seen = self._before.get(name, Counted()), count(channel.ledger), self._seen.get(name)
        oldest = channel.oldest()
        low, high = (None, None) if seen is None else _percentiles(seen.rewards)
        return Moment(
            steps=now.steps - then.steps,
            tokens=now.tokens - then.tokens,
            trained_steps=now.trained_steps - then.trained_steps,
            trained_tokens=now.trained_tokens - then.trained_tokens,
            rewards=seen.count if seen else 0,
            reward_mean=seen.total / seen.count if seen and seen.count else None,
            reward_low=low,
            reward_high=high,
            staleness=dict(seen.staleness) if seen else {},
            groups=len(channel),
            ready_groups=len(channel.ready),
            oldest_age=0.0 if oldest is None else max(0.0, self._end - oldest.opened_at),
            dropped_tokens={
                cause: tokens for cause in now.lost if (tokens := now.lost[cause] - then.lost.get(cause, 0))
            },
        )


def count(ledger: Ledger) -> Counted:
    lost = {cause: tally.tokens for cause, tally in ledger.dropped.items()}
    lost |= {f"left out: {kind}": tally.tokens for kind, tally in ledger.left_out.items()}
    accepted, shipped = ledger.accepted, ledger.shipped
    return Counted(accepted.steps, accepted.tokens, shipped.steps, shipped.tokens, lost)


def _end_of(now: float, length: float) -> float:
    """When the interval ends that `now` is in."""
    return (math.floor(now / length) + 1) * length


def _last(intervals: Sequence[Interval], many: float) -> Sequence[Interval]:
    return intervals[-max(1, math.ceil(many)) :]


def _folded(intervals: Sequence[Interval]) -> dict[str, Moment]:
    """Intervals that follow one another, as one."""
    names = {name: None for _, moments in intervals for name in moments}
    return {name: one_after_another([moments.get(name, STILL) for _, moments in intervals]) for name in names}


def _percentiles(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """The 10th and the 90th."""
    if not rewards:
        return None, None
    ordered = sorted(rewards)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def as_series(strips: Sequence[Strip]) -> Series:
    """The series of a pool from what its shards tell. It ends with the first of them to end, for what is held is known
    only where all of them tell of it."""
    told = [strip for strip in strips if strip.intervals]
    if not told:
        return Series(interval=FINE, ends=[], channels={})
    until = min(strip.intervals[-1][0] for strip in told)
    by_end: dict[float, list[Mapping[str, Moment]]] = {}
    for strip in told:
        for end, moments in strip.intervals:
            if end <= until:
                by_end.setdefault(end, []).append(moments)
    ends = sorted(by_end)
    names = sorted({name for parts in by_end.values() for moments in parts for name in moments})
    return Series(
        interval=told[0].length,
        ends=ends,
        channels={name: as_window([_at(by_end[end], name) for end in ends]) for name in names},
    )


def _at(parts: Sequence[Mapping[str, Moment]], name: str) -> Moment:
    return side_by_side([moments.get(name, STILL) for moments in parts])
