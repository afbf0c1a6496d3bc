"""The pool's own time series, in two ring buffers: an hour in steps of 5 seconds, a day in steps of a minute.

Steps and tokens are differences of the ledgers, taken when an interval ends, so that a step costs nothing here; rewards
and staleness are noted once a rollout, when it is acknowledged. What always holds: intervals end at multiples of their
length, so that those of several shards fit together; what happened between two messages belongs to the first's time.
They are kept in memory: a shard that restarts begins new ones.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepwell.pool.api.series import COARSE, EMPTY, FINE, Bucket, Interval, SeriesChunk, merge_consecutive
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.ledger import Ledger

FINE_KEPT, COARSE_KEPT = 720, 1_440
SAMPLES = 4_096
"""Rewards of one interval among which percentiles are looked for: the last so many."""


class LedgerTotals(NamedTuple):
    """A ledger's numbers at one moment."""

    steps: int = 0
    tokens: int = 0
    trained_steps: int = 0
    trained_tokens: int = 0
    lost: Mapping[str, int] = {}
    """Tokens dropped and left out, by what the series calls it."""


class Accumulator:
    """The rollouts of one channel that were acknowledged in the interval that is going."""

    __slots__ = ("count", "rewards", "staleness", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.rewards: list[float] = []
        self.staleness: dict[int, int] = {}

    def add(self, trained: TrajectorySnapshot, version: int) -> None:
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


class SeriesRecorder:
    def __init__(self, channels: Mapping[str, ChannelIndex]) -> None:
        self._channels = channels
        self._fine: deque[Interval] = deque(maxlen=FINE_KEPT)
        self._coarse: deque[Interval] = deque(maxlen=COARSE_KEPT)
        self._minute: list[Interval] = []
        """The fine intervals of the coarse one that is going."""
        self._end = 0.0
        """Of the fine interval that is going; 0 before the first."""
        self._before: dict[str, LedgerTotals] = {}
        """The ledgers when it began."""
        self._seen: dict[str, Accumulator] = {}

    def tick(self, now: float) -> None:
        """Let time pass; nearly always a single comparison."""
        if now < self._end:
            return
        if self._end == 0.0:
            self._before = {name: ledger_totals(channel.ledger) for name, channel in self._channels.items()}
            self._end = _end_of(now, FINE)
            return
        self._close()
        kept = COARSE * COARSE_KEPT
        if now - self._end > kept:  # no one has called for a day
            self._end = _end_of(now - kept, FINE)
        while now >= self._end:
            self._close()

    def seen(self, channel: str) -> Accumulator:
        """Where to note what is acknowledged now."""
        if channel not in self._seen:
            self._seen[channel] = Accumulator()
        return self._seen[channel]

    def strip(self, seconds: float) -> SeriesChunk:
        """The last so many seconds, in the finest steps that reach so far back."""
        if self._end == 0.0:
            return SeriesChunk(FINE, [])
        going: Interval = (self._end, self._moments())
        if seconds <= FINE * FINE_KEPT:
            return SeriesChunk(FINE, _last([*self._fine, going], seconds / FINE))
        minute: Interval = (_end_of(self._end - FINE, COARSE), _folded([*self._minute, going]))
        return SeriesChunk(COARSE, _last([*self._coarse, minute], seconds / COARSE))

    # -- how -----------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """The interval that is going is over."""
        ended: Interval = (self._end, self._moments())
        self._fine.append(ended)
        self._minute.append(ended)
        if self._end % COARSE == 0.0:
            self._coarse.append((self._end, _folded(self._minute)))
            self._minute = []
        self._before = {name: ledger_totals(channel.ledger) for name, channel in self._channels.items()}
        self._seen.clear()
        self._end += FINE

    def _moments(self) -> dict[str, Bucket]:
        found = ((name, self._moment(name, channel)) for name, channel in self._channels.items())
        return {name: moment for name, moment in found if moment != EMPTY}

    def _moment(self, name: str, channel: ChannelIndex) -> Bucket:
        then, now, seen = self._before.get(name, LedgerTotals()), ledger_totals(channel.ledger), self._seen.get(name)
        oldest = channel.oldest()
        low, high = (None, None) if seen is None else _percentiles(seen.rewards)
        return Bucket(
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


def ledger_totals(ledger: Ledger) -> LedgerTotals:
    lost = {cause: tally.tokens for cause, tally in ledger.dropped.items()}
    lost |= {f"left out: {kind}": tally.tokens for kind, tally in ledger.left_out.items()}
    accepted, shipped = ledger.accepted, ledger.shipped
    return LedgerTotals(accepted.steps, accepted.tokens, shipped.steps, shipped.tokens, lost)


def _end_of(now: float, length: float) -> float:
    """When the interval ends that `now` is in."""
    return (math.floor(now / length) + 1) * length


def _last(intervals: Sequence[Interval], many: float) -> Sequence[Interval]:
    return intervals[-max(1, math.ceil(many)) :]


def _folded(intervals: Sequence[Interval]) -> dict[str, Bucket]:
    """Intervals that follow one another, as one."""
    names = {name: None for _, moments in intervals for name in moments}
    return {name: merge_consecutive([moments.get(name, EMPTY) for _, moments in intervals]) for name in names}


def _percentiles(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """The 10th and the 90th."""
    if not rewards:
        return None, None
    ordered = sorted(rewards)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]
