"""An export: groups from a source are written to a target."""

from collections.abc import AsyncIterable, AsyncIterator

from stepwell.exports.file_target import FileTarget
from stepwell.exports.progress import TransferProgress
from stepwell.steps.groups import StepGroup, split_by_size

PAGE_BYTES = 2**24
"""Bytes written at once: a row group of Parquet."""


async def export(groups: AsyncIterable[StepGroup], target: FileTarget, progress: TransferProgress) -> None:
    async for page in split_by_size(groups, PAGE_BYTES):
        target.write(page)
        progress.add(sum(group.count() for group in page), sum(len(group.columns) for group in page), target.nbytes)


async def limited(groups: AsyncIterable[StepGroup], limit: int) -> AsyncIterator[StepGroup]:
    """The first `limit` trajectories; the last group may be cut."""
    left = limit
    async for group in groups:
        trajectories = group.trajectories()[:left]
        left -= len(trajectories)
        yield group.only(trajectories)
        if left == 0:
            return
