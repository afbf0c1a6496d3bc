# ruff: noqa: N802 - arrays carry their shape in the name, properties too
"""Several fetched batches as one, which is trained and acknowledged as a whole."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.columns import Columns, stack
from stepwell.steps.layout import IndexArray, firsts_of
from stepwell.steps.left_out import LeftOutSteps, WholeGroups, join_left_out, whole_groups
from stepwell.steps.rows import MergedRows, merge_rows
from stepwell.trainers.ports import TrainingBatch


class JoinedBatch:
    """A TrainingBatch with the groups of the first part, then those of the second, … Two parts share no group."""

    def __init__(self, parts: Sequence[TrainingBatch]) -> None:
        self._parts = parts

    @property
    def leases(self) -> tuple[tuple[str, str], ...]:
        return tuple(lease for part in self._parts for lease in part.leases)

    @cached_property
    def columns(self) -> Columns:
        return stack([part.columns for part in self._parts])

    @cached_property
    def trajectory_of_S(self) -> IndexArray:
        return _counted_on([part.trajectory_of_S for part in self._parts])

    @cached_property
    def group_of_T(self) -> IndexArray:
        return _counted_on([part.group_of_T for part in self._parts])

    @cached_property
    def returns_T(self) -> NDArray[np.float64]:
        return np.concatenate([part.returns_T for part in self._parts])

    @cached_property
    def left_out(self) -> LeftOutSteps:
        return join_left_out([part.left_out for part in self._parts], [_count(part.group_of_T) for part in self._parts])

    def whole_groups(self) -> WholeGroups:
        return self._whole_groups

    @cached_property
    def _whole_groups(self) -> WholeGroups:
        uids_T = [self.columns.trajectory_uids[first] for first in firsts_of(self.trajectory_of_S).tolist()]
        return whole_groups(self.left_out, uids_T, self.group_of_T, self.returns_T)

    def merged(self) -> MergedRows:
        return merge_rows(self.columns, self.trajectory_of_S, self.group_of_T)


def _counted_on(parts: Sequence[IndexArray]) -> IndexArray:
    """The numbers of a later part follow those of the parts before it."""
    firsts = np.cumsum([0, *map(_count, parts)])
    return np.concatenate([numbers + first for numbers, first in zip(parts, firsts, strict=False)])


def _count(numbers: IndexArray) -> int:
    return int(numbers.max(initial=-1)) + 1
