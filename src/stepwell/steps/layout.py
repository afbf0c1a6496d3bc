"""Where things stand in the flat arrays of a batch: offsets of steps, and which step belongs to which trajectory.

What always holds: offsets are one longer than what they divide, so that `offsets[i]:offsets[i + 1]` is the i-th part;
a trajectory never crosses from one group into the next, even if the next begins with the same uid.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.columns import Columns
from stepwell.steps.step import BoolArray, IntArray

IndexArray: TypeAlias = NDArray[np.int64]


def offsets(lengths: NDArray[np.integer[Any]]) -> IndexArray:
    """Where each of the parts of these lengths begins, and where the last one ends."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def parts_of(lengths: NDArray[np.integer[Any]]) -> IndexArray:
    """For each element, the number of the part it is in."""
    return np.repeat(np.arange(len(lengths)), lengths)


def token_offsets(columns: Columns) -> IndexArray:
    """Of each step in `columns.tokens`."""
    return offsets(columns.prompt_lengths_S.astype(np.int64) + columns.response_lengths_S)


def trajectories_of(columns: Columns, group_sizes_G: IntArray) -> IndexArray:
    """Each step's trajectory, counted from 0 through the whole batch."""
    groups_S = parts_of(group_sizes_G).tolist()
    number, before, numbers = -1, None, []
    for here in zip(groups_S, columns.trajectory_uids, strict=True):
        number += here != before
        before = here
        numbers.append(number)
    return np.array(numbers, np.int64)


def groups_of(trajectory_of_S: IndexArray, group_sizes_G: IntArray) -> IndexArray:
    """Each trajectory's group."""
    _, firsts_T = np.unique(trajectory_of_S, return_index=True)
    return parts_of(group_sizes_G)[firsts_T]


def returns_of(columns: Columns, trajectory_of_S: IndexArray) -> NDArray[np.float64]:
    """Each rollout's return: the sum of its scored steps' rewards; NaN if none is scored, which is not 0."""
    scored_S = ~np.isnan(columns.rewards_S)
    trajectories = int(trajectory_of_S[-1]) + 1 if len(trajectory_of_S) else 0
    sums_T = np.bincount(trajectory_of_S[scored_S], columns.rewards_S[scored_S], trajectories)
    scored_T = np.bincount(trajectory_of_S[scored_S], minlength=trajectories)
    return np.where(scored_T > 0, sums_T, np.nan)


def with_logprobs(columns: Columns) -> BoolArray:
    """Which steps have a log-probability for every token of their response."""
    missing_S = sums(np.isnan(columns.logprobs), columns.response_lengths_S)
    complete_S: BoolArray = (missing_S == 0) & (columns.response_lengths_S > 0)
    return complete_S


def sums(flags: BoolArray, lengths: IntArray) -> IndexArray:
    """How many flags are set in each part."""
    counts = np.zeros(len(lengths), np.int64)
    filled = lengths > 0  # reduceat takes an empty part for a part of one
    if filled.any():
        counts[filled] = np.add.reduceat(flags, offsets(lengths)[:-1][filled], dtype=np.int64)
    return counts


def reward_carrier(untrainable: Sequence[str | None]) -> int:
    """The step of a trajectory that carries the rollout's reward: the last trainable one, else the last one."""
    return next((n for n in reversed(range(len(untrainable))) if untrainable[n] is None), len(untrainable) - 1)
