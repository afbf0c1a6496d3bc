"""How much of its advantage a step gets: credit over the tree that the steps of a trajectory form.

A step continues the step whose tokens, prompt and response, are the longest beginning of its prompt. A step that none
continues is a leaf: the end of a conversation, of a sub-agent, or of an attempt that was given up.

- The tree follows from the tokens alone: not from the order of the steps, and not from the rows that they share.
- If several steps have the same tokens, the leaves below them count for each in equal parts. So the steps that continue
  none have all leaves of the trajectory below them, each once.
- A step without a response is not in the tree.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import BadRequest
from stepwell.steps.columns import NO_BASE, Columns
from stepwell.steps.layout import IndexArray
from stepwell.steps.rows import PrefixPoints, bases_within
from stepwell.steps.step import BoolArray

CreditKind: TypeAlias = Literal["root", "leaf", "split"]
Floats: TypeAlias = NDArray[np.float64]
Point: TypeAlias = tuple[int, int]
"""A place in the prefix tree: the first step that has these tokens, and how many. Equal prefixes have the same."""

SHARES: Mapping[CreditKind, Callable[[Floats, Floats], Floats]] = {
    "root": lambda below_S, all_S: np.ones_like(below_S),
    "leaf": lambda below_S, all_S: below_S,
    "split": lambda below_S, all_S: below_S / np.maximum(all_S, 1.0),
}
"""The factor of a step's advantage, given the number of leaves below it and in its whole trajectory.

- root: every step counts once.
- leaf: each way from a root of the tree to a leaf counts like a rollout.
- split: the rollout is the mean of these ways.
"""


class LeafCounts(NamedTuple):
    below_S: Floats
    """How many leaves a step leads to; 1 for a leaf itself, 0 for a step without a response."""
    is_leaf_S: BoolArray


def credit_shares(kind: CreditKind, columns: Columns, trajectory_of_S: IndexArray) -> Floats:
    """The share by which the advantage of each step is multiplied."""
    if kind not in get_args(CreditKind):
        raise BadRequest(f"credit is one of {', '.join(get_args(CreditKind))}, not {kind!r}")
    if kind == "root":  # needs no tree
        return np.ones(len(columns), np.float64)
    leaves = count_leaves(columns, trajectory_of_S)
    leaves_T = np.bincount(trajectory_of_S, leaves.is_leaf_S).astype(np.float64)
    return SHARES[kind](leaves.below_S, leaves_T[trajectory_of_S])


def count_leaves(columns: Columns, trajectory_of_S: IndexArray) -> LeafCounts:
    ends, lengths = _StepEnds(columns, trajectory_of_S), columns.lengths_S.tolist()
    below_S, is_leaf_S = np.zeros(len(columns), np.float64), np.zeros(len(columns), np.bool_)
    below_point: dict[Point, float] = {}
    for step in sorted(ends.point_of, key=lengths.__getitem__, reverse=True):  # a step is longer than what it continues
        point = ends.point_of[step]
        is_leaf_S[step] = point not in below_point
        below_S[step] = below_point[point] / len(ends.steps_at[point]) if point in below_point else 1.0
        if (continued := ends.longest_in_prompt(step)) is not None:
            below_point[continued] = below_point.get(continued, 0.0) + below_S[step]
    return LeafCounts(below_S, is_leaf_S)


class _StepEnds(PrefixPoints):
    """The points of the prefix tree at which steps end."""

    def __init__(self, columns: Columns, trajectory_of_S: IndexArray) -> None:
        super().__init__(columns, bases_within(columns, trajectory_of_S))
        self.point_of: dict[int, Point] = {}
        self.steps_at: dict[Point, list[int]] = defaultdict(list)
        for step in np.flatnonzero(columns.response_lengths_S).tolist():
            self.point_of[step] = point = (self._first_step(step, self._lengths[step]), self._lengths[step])
            self.steps_at[point].append(step)
        self._lengths_at: dict[int, list[int]] = defaultdict(list)
        """The lengths of the points that lie among the tokens which a step adds, in order."""
        for first, length in sorted(self.steps_at):
            self._lengths_at[first].append(length)
        self._in_base: list[Point | None] = []
        """The longest point among the tokens that a step has in common with its base."""
        for base, shared in zip(self._bases, self._shared, strict=True):
            self._in_base.append(self._longest(base, shared))

    def longest_in_prompt(self, step: int) -> Point | None:
        return self._longest(step, self._prompts[step])

    def _longest(self, step: int, limit: int) -> Point | None:
        """The longest point among the first `limit` tokens of a step."""
        while step != NO_BASE:
            lengths = self._lengths_at.get(step, [])
            if at := bisect_right(lengths, limit):
                return step, lengths[at - 1]
            if limit >= self._shared[step]:
                return self._in_base[step]
            step = self._bases[step]
        return None
