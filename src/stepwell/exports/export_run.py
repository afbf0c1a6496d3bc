"""The way out: groups from wherever they come, through a shape, into a sink."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable

from stepwell.exports.file_target import Sink
from stepwell.exports.progress import TransferProgress
from stepwell.exports.selection import Choice
from stepwell.steps.groups import StepGroup, split_by_size

AT_ONCE = 2**24
"""Bytes that are written at once: a row group of Parquet."""


async def export(groups: AsyncIterable[StepGroup], sink: Sink, progress: TransferProgress) -> None:
    async for page in split_by_size(groups, AT_ONCE):
        sink.write(page)
        progress.add(sum(group.count() for group in page), sum(len(group.columns) for group in page), sink.nbytes)


async def chosen(groups: Iterable[StepGroup], choice: Choice) -> AsyncIterator[StepGroup]:
    """What a choice takes of stored groups."""
    for group in groups:
        taken = choice.of_group(group)
        if taken is not None:
            yield taken


async def limited(groups: AsyncIterable[StepGroup], limit: int) -> AsyncIterator[StepGroup]:
    """The first so many trajectories; the last group may be cut."""
    left = limit
    async for group in groups:
        trajectories = group.trajectories()[:left]
        left -= len(trajectories)
        yield group.only(trajectories)
        if left == 0:
            return
