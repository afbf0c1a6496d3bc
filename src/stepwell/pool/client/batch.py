# ruff: noqa: N802 - arrays carry their shape in the name, properties too
"""A Batch: whole groups, as a trainer gets them, and the forms it can be converted to.

- Groups are in the order they were taken, then by trajectory, then by step_index. A group has at least one step.
- The arrays may be in Ray's shared memory, where they are read-only.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import LeasedGroups
from stepwell.steps import layout
from stepwell.steps.arrow import columns_from_arrow, columns_to_arrow, group_columns, group_sizes
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.layout import IndexArray
from stepwell.steps.padding import Overlong, PaddedSteps, arrays_of, pad_steps, to_tensors
from stepwell.steps.returns import NOTHING_LEFT_OUT, LeftOutSteps, WholeGroups, left_out_of_groups, whole_groups
from stepwell.steps.rows import MergedRows, merge_rows
from stepwell.steps.step import BoolArray, IntArray, Step, ids_array, mask_array

if TYPE_CHECKING:
    import pyarrow
    import torch

T = TypeVar("T")
N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Batch:
    columns: Columns
    group_sizes_G: IntArray
    """Number of steps in each group. Two groups may have the same prompt_uid."""
    opened_at_G: NDArray[np.float64]
    """When each group was opened, in wall-clock seconds; 0 if unknown."""
    attempts_G: IntArray
    """How often each group was leased before."""
    from_history_G: BoolArray
    sources: list[str]
    """The environment that each group comes from; empty for agents."""
    leases: tuple[tuple[str, str], ...] = ()
    """(shard, lease) of every part of the batch; an acknowledgement names them."""
    left_out: LeftOutSteps = NOTHING_LEFT_OUT
    """The rewards of the groups' steps that are not in the batch."""

    def __len__(self) -> int:
        return len(self.group_sizes_G)

    # -- steps, without copying tokens -------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        return unpack(self.columns, copy=False)

    def trajectories(self) -> list[list[Step]]:
        return _divided(self.steps(), np.bincount(self.trajectory_of_S))

    def groups(self) -> list[list[list[Step]]]:
        """Groups of trajectories of steps."""
        return _divided(self.trajectories(), np.bincount(self.group_of_T))

    # -- indexes into the flat arrays --------------------------------------------------------------------------------

    @property
    def token_offsets_S(self) -> IndexArray:
        """Step i is `columns.tokens[offsets[i]:offsets[i + 1]]`; S + 1 values."""
        return self.columns.token_offsets_S

    @property
    def response_offsets_S(self) -> IndexArray:
        """The same for `columns.logprobs` and `columns.mask`."""
        return layout.offsets(self.columns.response_lengths_S)

    @cached_property
    def trajectory_of_S(self) -> IndexArray:
        """The number of each step's trajectory; trajectories are counted from 0 in the batch."""
        return _read_only(layout.trajectories_of(self.columns.trajectory_uids, self.group_sizes_G))

    @cached_property
    def group_of_T(self) -> IndexArray:
        return _read_only(layout.groups_of(self.trajectory_of_S, self.group_sizes_G))

    @cached_property
    def returns_T(self) -> NDArray[np.float64]:
        """Each trajectory's return: its outcome reward and the rewards of all its steps, also of those that are not in
        the batch; NaN if there is no reward."""
        return _read_only(layout.returns_of(self.columns.returns_S, self.columns.rewards_S, self.trajectory_of_S))

    @property
    def rewards_T(self) -> NDArray[np.float64]:
        """The same as `returns_T`."""
        return self.returns_T

    def whole_groups(self) -> WholeGroups:
        """All rollouts of the groups, also those of which the batch has no step: they count in a baseline."""
        return self._whole_groups

    @cached_property
    def _whole_groups(self) -> WholeGroups:
        uids_T = [self.columns.trajectory_uids[first] for first in layout.firsts_of(self.trajectory_of_S).tolist()]
        return whole_groups(self.left_out, uids_T, self.group_of_T, self.returns_T)

    # -- rows to train on --------------------------------------------------------------------------------------------

    def padded(
        self, prompt_length: int, response_length: int, *, pad_id: int = 0, overlong: Overlong = "raise"
    ) -> PaddedSteps:
        """One row a step. A step that is too long raises, or is left out with `overlong="drop"`; see `kept_S`."""
        return pad_steps(self.columns, prompt_length, response_length, pad_id=pad_id, overlong=overlong)

    def merged(self) -> MergedRows:
        """One row for all steps that extend one another, so that each token is computed once."""
        return merge_rows(self.columns, self.trajectory_of_S, self.group_of_T)

    # -- forms of other libraries ------------------------------------------------------------------------------------

    def to_torch(self) -> "dict[str, torch.Tensor]":
        """All arrays of the batch and of its columns, under their names here."""
        index_arrays = {
            "token_offsets_S": self.token_offsets_S,
            "response_offsets_S": self.response_offsets_S,
            "trajectory_of_S": self.trajectory_of_S,
            "group_of_T": self.group_of_T,
            "returns_T": self.returns_T,
            "rewards_T": self.rewards_T,
            "temperatures_S": self.columns.temperatures_S,
        }
        columns = self.columns.expanded()
        arrays = {"tokens" if name == "added" else name: array for name, array in arrays_of(columns).items()}
        return to_tensors({**arrays, **arrays_of(self), **index_arrays})

    def to_arrow(self) -> "pyarrow.Table":
        """One row a step, with a schema version; `batch_from_arrow` reads it back, without its leases."""
        of_groups = {
            "opened_at": self.opened_at_G,
            "attempts": self.attempts_G,
            "from_history": self.from_history_G,
            "source": self.sources,
            "left_out": [self.left_out.of_group(group) for group in range(len(self))],
        }
        return columns_to_arrow(self.columns, self.group_sizes_G, of_groups)


def _read_only(array: NDArray[N]) -> NDArray[N]:
    """Others read it too."""
    array.flags.writeable = False
    return array


def make_batch(
    columns: Columns,
    group_sizes: ArrayLike,
    *,
    opened_at: ArrayLike | None = None,
    attempts: ArrayLike | None = None,
    from_history: ArrayLike | None = None,
    sources: list[str] | None = None,
    leases: tuple[tuple[str, str], ...] = (),
    left_out: LeftOutSteps = NOTHING_LEFT_OUT,
) -> Batch:
    """A batch; by default of groups that are new and were never leased."""
    sizes = ids_array(group_sizes)
    if sizes.sum() != len(columns) or (sizes < 1).any():
        raise BadRequest(f"groups of {sizes.tolist()} steps do not divide {len(columns)} steps")
    return Batch(
        columns,
        sizes,
        np.zeros(len(sizes), np.float64) if opened_at is None else np.asarray(opened_at, np.float64),
        np.zeros(len(sizes), np.int32) if attempts is None else ids_array(attempts),
        np.zeros(len(sizes), np.bool_) if from_history is None else mask_array(from_history),
        [""] * len(sizes) if sources is None else sources,
        leases,
        left_out,
    )


def batch_from_arrow(table: "pyarrow.Table") -> Batch:
    """The batch whose table this is. Its leases are not in the table: a copy must not acknowledge anything."""
    columns, sizes = columns_from_arrow(table), group_sizes(table)
    of_groups = group_columns(table, sizes)
    return make_batch(
        columns,
        sizes,
        opened_at=of_groups["opened_at"],
        attempts=of_groups["attempts"],
        from_history=of_groups["from_history"],
        sources=of_groups["source"],
        left_out=left_out_of_groups(of_groups["left_out"]),
    )


def batch_of(leased: LeasedGroups) -> Batch:
    return make_batch(
        leased.columns,
        leased.group_sizes,
        opened_at=leased.opened_at,
        attempts=leased.attempts,
        from_history=leased.from_history,
        sources=leased.sources,
        leases=leased.leases,
        left_out=leased.left_out,
    )


def _divided(items: list[T], sizes: NDArray[np.intp]) -> list[list[T]]:
    return [items[start:end] for start, end in pairwise(layout.offsets(sizes).tolist())]
