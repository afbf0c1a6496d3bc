"""A Batch: whole groups, as the trainer gets them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from stepwell.core.columns import Columns, pack, unpack
from stepwell.core.step import IntArray, Step, ids_array


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Groups in the order they were taken; in each its trajectories; in each its steps by step_index."""

    columns: Columns
    group_sizes_G: IntArray
    """How many steps each group has. A prompt may come again later: its uid alone does not tell groups apart."""

    def __len__(self) -> int:
        return len(self.group_sizes_G)

    def steps(self) -> list[Step]:
        return unpack(self.columns, copy=False)

    def groups(self) -> list[list[list[Step]]]:
        """Groups of trajectories of steps."""
        steps = iter(self.steps())
        return [
            [list(of_one) for _, of_one in groupby(group, key=lambda step: step.trajectory_uid)]
            for group in ([next(steps) for _ in range(size)] for size in self.group_sizes_G.tolist())
        ]


def make_batch(groups: Sequence[Sequence[Step]]) -> Batch:
    return Batch(pack([step for group in groups for step in group]), ids_array([len(group) for group in groups]))
