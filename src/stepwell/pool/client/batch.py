# ruff: noqa: N802 - arrays carry their shape in the name, properties too
"""A Batch: whole groups, as the trainer gets them, and the shapes it can be had in.

What always holds: groups stand in the order they were taken, in each its trajectories one after the other, in each its
steps by step_index; a group has at least one step. The arrays may lie in Ray's shared memory, where they are read-only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Taken
from stepwell.pool.client.tensors import arrays_of, tensors
from stepwell.pool.client.views import MergedBatch, PaddedBatch, as_a
from stepwell.steps import layout
from stepwell.steps.columns import Columns, cut, stack, unpack
from stepwell.steps.layout import IndexArray
from stepwell.steps.padding import Overlong, pad_steps
from stepwell.steps.rows import merge_steps
from stepwell.steps.step import BoolArray, IntArray, Step, ids_array, mask_array

T = TypeVar("T")

if TYPE_CHECKING:
    import pyarrow
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    columns: Columns
    group_sizes_G: IntArray
    """How many steps each group has. A prompt may come again later: its uid alone does not tell groups apart."""
    opened_at_G: NDArray[np.float64]
    """When each group was opened, in wall-clock seconds; 0 where no one said."""
    attempts_G: IntArray
    """How often each group was handed out before."""
    from_history_G: BoolArray
    sources: list[str]
    """Where each group comes from: an environment's name; empty for agents."""
    leases: tuple[tuple[str, str], ...] = ()
    """(shard, lease) of every part of the batch: what an acknowledgement names."""

    def __len__(self) -> int:
        return len(self.group_sizes_G)

    # -- as steps, without copying a token ---------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        return unpack(self.columns, copy=False)

    def trajectories(self) -> list[list[Step]]:
        return _divided(self.steps(), np.bincount(self.trajectory_of_S))

    def groups(self) -> list[list[list[Step]]]:
        """Groups of trajectories of steps."""
        return _divided(self.trajectories(), np.bincount(self.group_of_T))

    # -- where things stand in the flat arrays -----------------------------------------------------------------------

    @property
    def token_offsets_S(self) -> IndexArray:
        """Step i is `columns.tokens[offsets[i]:offsets[i + 1]]`: S + 1 long."""
        return layout.token_offsets(self.columns)

    @property
    def response_offsets_S(self) -> IndexArray:
        """The same for `columns.logprobs` and `columns.mask`."""
        return layout.offsets(self.columns.response_lengths_S)

    @property
    def trajectory_of_S(self) -> IndexArray:
        """Each step's trajectory, counted from 0 through the whole batch."""
        return layout.trajectories_of(self.columns, self.group_sizes_G)

    @property
    def group_of_T(self) -> IndexArray:
        return layout.groups_of(self.trajectory_of_S, self.group_sizes_G)

    @property
    def rewards_T(self) -> NDArray[np.float64]:
        """Each rollout's return: the sum of its scored steps' rewards; NaN if none is scored, which is not 0."""
        return layout.returns_of(self.columns, self.trajectory_of_S)

    # -- as rows to train on -----------------------------------------------------------------------------------------

    def padded(
        self, prompt_length: int, response_length: int, *, pad_id: int = 0, overlong: Overlong = "raise"
    ) -> PaddedBatch:
        """One row a step. A step that is too long raises, or is left out with `overlong="drop"`: see `kept_S`."""
        return as_a(
            PaddedBatch, pad_steps(self.columns, prompt_length, response_length, pad_id=pad_id, overlong=overlong)
        )

    def merged(self) -> MergedBatch:
        """One row for all steps that extend one another, so that no token is computed twice."""
        return as_a(MergedBatch, merge_steps(self.columns, self.trajectory_of_S, self.group_of_T))

    # -- in other libraries' terms -----------------------------------------------------------------------------------

    def to_torch(self) -> "dict[str, torch.Tensor]":
        """All arrays above, those of the columns included, under their names here. See pool/client/tensors.py."""
        index_arrays = {
            "token_offsets_S": self.token_offsets_S,
            "response_offsets_S": self.response_offsets_S,
            "trajectory_of_S": self.trajectory_of_S,
            "group_of_T": self.group_of_T,
            "rewards_T": self.rewards_T,
        }
        return tensors({**arrays_of(self.columns), **arrays_of(self), **index_arrays})

    def to_arrow(self) -> "pyarrow.Table":
        """One row a step, with a schema version; see steps/arrow.py, which reads it back."""
        from stepwell.steps.arrow import batch_to_arrow  # it imports this module

        return batch_to_arrow(self)


def make_batch(
    columns: Columns,
    group_sizes: ArrayLike,
    *,
    opened_at: ArrayLike | None = None,
    attempts: ArrayLike | None = None,
    from_history: ArrayLike | None = None,
    sources: list[str] | None = None,
    leases: tuple[tuple[str, str], ...] = (),
) -> Batch:
    """A batch of groups that are new, unless told otherwise."""
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
    )


def concat(batches: Sequence[Batch]) -> Batch:
    """One batch of all their groups: new ones first, oldest first. A single batch is returned as it is."""
    if len(batches) == 1:
        return batches[0]
    opened_at_G = np.concatenate([batch.opened_at_G for batch in batches])
    from_history_G = np.concatenate([batch.from_history_G for batch in batches])
    order_G = np.lexsort((opened_at_G, from_history_G))
    pieces = [piece for batch in batches for piece in cut(batch.columns, batch.group_sizes_G.tolist())]
    sources = [source for batch in batches for source in batch.sources]
    return Batch(
        stack([pieces[g] for g in order_G.tolist()]),
        np.concatenate([batch.group_sizes_G for batch in batches])[order_G],
        opened_at_G[order_G],
        np.concatenate([batch.attempts_G for batch in batches])[order_G],
        from_history_G[order_G],
        [sources[g] for g in order_G.tolist()],
        tuple(lease for batch in batches for lease in batch.leases),
    )


def _divided(items: list[T], sizes: NDArray[np.intp]) -> list[list[T]]:
    return [items[start:end] for start, end in pairwise(layout.offsets(sizes).tolist())]


def batch_of(taken: Taken, leases: tuple[tuple[str, str], ...]) -> Batch:
    return make_batch(
        taken.columns,
        taken.group_sizes,
        opened_at=taken.opened_at,
        attempts=taken.attempts,
        from_history=taken.from_history,
        sources=taken.sources,
        leases=leases,
    )
