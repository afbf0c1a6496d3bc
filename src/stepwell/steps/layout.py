"""Positions in flat arrays: where the parts of an array begin, and which step belongs to which trajectory and group.

- Offsets are one longer than the number of parts: part i is `offsets[i]:offsets[i + 1]`.
- A trajectory belongs to one group, even if the next group begins with a trajectory of the same uid.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.step import BoolArray, IntArray

IndexArray: TypeAlias = NDArray[np.int64]


def offsets(lengths: NDArray[np.integer[Any]]) -> IndexArray:
    """Where each part begins, and where the last one ends."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    return ends


def parts_of(lengths: NDArray[np.integer[Any]]) -> IndexArray:
    """The part of each element."""
    return np.repeat(np.arange(len(lengths)), lengths)


def is_first(part_of: IndexArray) -> BoolArray:
    """Which elements begin a part, if the elements of a part follow one another."""
    first = np.ones(len(part_of), np.bool_)
    np.not_equal(part_of[1:], part_of[:-1], out=first[1:])
    return first


def firsts_of(part_of: IndexArray) -> IndexArray:
    """Where each part begins, if the elements of a part follow one another."""
    return np.flatnonzero(is_first(part_of))


def in_parts_of(flags: BoolArray, part_of: IndexArray) -> BoolArray:
    """Which elements are in a part with a flag."""
    flagged: BoolArray = np.bincount(part_of, flags) > 0
    return flagged[part_of]


def run_lengths(names: Iterable[object]) -> list[int]:
    """How often each name follows itself: a part ends where the name changes."""
    return [len(list(run)) for _, run in groupby(names)]


def sums(flags: BoolArray, lengths: IntArray) -> IndexArray:
    """How many flags are set in each part."""
    counts = np.zeros(len(lengths), np.int64)
    filled = lengths > 0  # reduceat reads one element of an empty part
    if filled.any():
        counts[filled] = np.add.reduceat(flags, offsets(lengths)[:-1][filled], dtype=np.int64)
    return counts


def trajectories_of(trajectory_uids: Sequence[str], group_sizes_G: IntArray) -> IndexArray:
    """The trajectory of each step, counted from 0 over the whole batch."""
    groups_S = parts_of(group_sizes_G).tolist()
    number, previous, numbers = -1, None, []
    for named in zip(groups_S, trajectory_uids, strict=True):
        number += named != previous
        previous = named
        numbers.append(number)
    return np.array(numbers, np.int64)


def groups_of(trajectory_of_S: IndexArray, group_sizes_G: IntArray) -> IndexArray:
    """The group of each trajectory."""
    return parts_of(group_sizes_G)[firsts_of(trajectory_of_S)]


def returns_of(
    returns_S: NDArray[np.float64], rewards_S: NDArray[np.float64], trajectory_of_S: IndexArray
) -> NDArray[np.float64]:
    """The return of each trajectory. Where the steps do not say it, as in older files, it is the sum of the rewards of
    the scored steps; NaN, not 0, if none is scored."""
    scored_S = ~np.isnan(rewards_S)
    trajectories = int(trajectory_of_S[-1]) + 1 if len(trajectory_of_S) else 0
    sums_T = np.bincount(trajectory_of_S[scored_S], rewards_S[scored_S], trajectories)
    scored_T = np.bincount(trajectory_of_S[scored_S], minlength=trajectories)
    returns_T = np.where(scored_T > 0, sums_T, np.nan)
    known_S = ~np.isnan(returns_S)
    returns_T[trajectory_of_S[known_S]] = returns_S[known_S]
    return returns_T


def reward_carrier(untrainable: Sequence[str | None]) -> int:
    """The step of a trajectory that carries the rollout's reward: the last trainable one, else the last one."""
    return next((n for n in reversed(range(len(untrainable))) if untrainable[n] is None), len(untrainable) - 1)
