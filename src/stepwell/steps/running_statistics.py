"""Exponentially weighted mean and deviation of rewards, over batches.

- A reward counts less with each later one of its key: after `MEMORY` of them 1/e of its first weight.
- The weights of all past rewards are divided by their sum, so the first ones are not pulled towards 0.
- The result does not depend on the order within a batch.
- Statistics are never changed: `after` gives new ones, which count once their batch is trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.layout import IndexArray
from stepwell.steps.step import BoolArray

Floats = NDArray[np.float64]
MEMORY = 100.0
"""Rollouts."""
ALL = ""
"""The key under which all rollouts count."""
MAX_KEYS = 10_000
"""Tasks that are remembered; those that were longest without a rollout are dropped."""


@dataclass(frozen=True, slots=True)
class RunningEntry:
    weight: float = 0.0
    """The weight of all past rollouts together; at most 1."""
    common: float = 0.0
    """The mean of what counts for all steps of a rollout."""
    counted: float = 0.0
    """The mean of what counts for a step besides."""
    variance: float = 0.0
    """The variance of rollouts, each with the step of it that differs most."""

    def after(self, common_T: Floats, counted_S: Floats, trajectory_of_S: IndexArray) -> "RunningEntry":
        """The entry with these rollouts, all of the same weight. `trajectory_of_S` counts among them."""
        kept = float(np.exp(-len(common_T) / MEMORY))
        past = self.weight * kept
        total = past + (now := 1.0 - kept)
        common = (past * self.common + now * _mean(common_T)) / total
        of_steps = _mean(counted_S) if len(counted_S) else self.counted
        counted = (past * self.counted + now * of_steps) / total
        moved = self.common + self.counted - common - counted
        largest_T = np.abs(common_T - common)
        has_steps_T = np.bincount(trajectory_of_S, minlength=len(common_T)) > 0
        largest_T[has_steps_T] = 0.0
        np.maximum.at(largest_T, trajectory_of_S, np.abs(common_T[trajectory_of_S] + counted_S - common - counted))
        variance = (past * (self.variance + moved**2) + now * _mean(largest_T**2)) / total
        return RunningEntry(total, common, counted, variance)


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    entries: Mapping[str, RunningEntry] = field(default_factory=dict)
    """The entries by task, the one longest without a rollout first; ALL is that of all tasks."""

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    @property
    def of_all(self) -> RunningEntry:
        return self.entries.get(ALL, RunningEntry())

    def find(self, key: str) -> RunningEntry | None:
        """The entry of a task; of all tasks if it has no past; None if there is none at all."""
        return self.entries.get(key) or self.entries.get(ALL)

    def after(
        self,
        common_T: Floats,
        counted_S: Floats,
        trajectory_of_S: IndexArray,
        keys_T: Sequence[str],
        is_counted_T: BoolArray,
    ) -> "RunningStatistics":
        """The statistics with these rollouts; those that are not scored (NaN) or not to be counted change nothing."""
        entries = dict(self.entries)
        is_counted_T = is_counted_T & ~np.isnan(common_T)
        is_known_S = is_counted_T[trajectory_of_S] & ~np.isnan(counted_S)
        for key, of_key_T in _by_key(keys_T, is_counted_T):
            of_key_S = of_key_T[trajectory_of_S] & is_known_S
            numbers_T = np.cumsum(of_key_T) - 1
            past = entries.pop(key, RunningEntry())
            entries[key] = past.after(common_T[of_key_T], counted_S[of_key_S], numbers_T[trajectory_of_S[of_key_S]])
        while len(entries) > MAX_KEYS:
            entries.pop(next(iter(entries)))
        return RunningStatistics(entries)

    def as_numbers(self) -> dict[str, list[float]]:
        """The numbers for a checkpoint."""
        return {key: list(astuple(entry)) for key, entry in self.entries.items()}


NO_PAST = RunningStatistics()


def statistics_of(numbers: Mapping[str, Sequence[float]]) -> RunningStatistics:
    """The statistics in a checkpoint."""
    return RunningStatistics({key: RunningEntry(*values) for key, values in numbers.items()})


def _mean(values: Floats) -> float:
    return float(values.sum()) / len(values)


def _by_key(keys_T: Sequence[str], is_counted_T: BoolArray) -> Iterator[tuple[str, BoolArray]]:
    """Which rollouts count for each key: the tasks, then all."""
    if not is_counted_T.any():
        return
    if any(keys_T):
        of_T = np.array(keys_T, object)
        for key in dict.fromkeys(of_T[is_counted_T].tolist()):
            if key != ALL:
                yield key, is_counted_T & (of_T == key)
    yield ALL, is_counted_T
