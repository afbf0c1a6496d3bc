"""Groups between a pool and a file.

- A group is whole: its trajectories one after the other, the steps of each in order.
- Pages of groups are bounded by bytes, so that memory does not grow with what is exported.
"""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, replace

from stepwell.steps.columns import Columns, cut, stack
from stepwell.steps.layout import run_lengths

STEP_BYTES = 1_000
"""The bytes that a step takes beside its arrays, roughly."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    columns: Columns
    source: str = ""
    channel: str = ""
    """Empty where it is not known: the archive of a pool does not have it."""

    @property
    def nbytes(self) -> int:
        columns = self.columns
        tokens = columns.added.itemsize * int(columns.lengths_S.sum())
        return tokens + columns.logprobs.nbytes + columns.mask.nbytes + STEP_BYTES * len(columns)

    def trajectories(self) -> list[Columns]:
        return cut(self.columns, run_lengths(self.columns.trajectory_uids))

    def count(self) -> int:
        """The number of trajectories in the group."""
        return len(set(self.columns.trajectory_uids))

    def only(self, trajectories: Sequence[Columns]) -> "StepGroup":
        return replace(self, columns=stack(trajectories))


def with_sorted_metadata(columns: Columns) -> Columns:
    """The same steps with the keys of metadata sorted: a pool does not keep their order."""
    return replace(columns, metadata=[dict(sorted(metadata.items())) for metadata in columns.metadata])


async def split_by_size(groups: AsyncIterable[StepGroup], nbytes: int) -> AsyncIterator[list[StepGroup]]:
    """Pages of about so many bytes, at least one group each."""
    page: list[StepGroup] = []
    held = 0
    async for group in groups:
        page.append(group)
        held += group.nbytes
        if held >= nbytes:
            yield page
            page, held = [], 0
    if page:
        yield page
