"""Groups on their way from a pool to a file, or back.

What always holds: a group comes whole, trajectory after trajectory, in each the steps in order; what is gathered before
it goes on is bounded by bytes, so that memory does not grow with what is exported.
"""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from stepwell.steps.columns import Columns, cut, stack

STEP_BYTES = 1_000
"""What a step takes beside its arrays, about."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    columns: Columns
    source: str = ""
    channel: str = ""
    """Empty where no one said: a pool's archive does not."""

    @property
    def nbytes(self) -> int:
        columns = self.columns
        arrays = columns.tokens.nbytes + columns.logprobs.nbytes + columns.mask.nbytes
        return arrays + STEP_BYTES * len(columns)

    def trajectories(self) -> list[Columns]:
        return cut(self.columns, [len(list(run)) for _, run in groupby(self.columns.trajectory_uids)])

    def count(self) -> int:
        """Its trajectories."""
        return len(set(self.columns.trajectory_uids))

    def only(self, trajectories: Sequence[Columns]) -> "StepGroup":
        return replace(self, columns=stack(trajectories))


async def split_by_size(groups: AsyncIterable[StepGroup], nbytes: int) -> AsyncIterator[list[StepGroup]]:
    """In pages of about so many bytes, at least a group each."""
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
