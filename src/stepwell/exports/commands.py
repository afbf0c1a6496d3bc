"""`stepwell export` and `stepwell import`, with the pool and the tokenizer handed in."""

import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from stepwell.common.tokenizers import Decode
from stepwell.config.exports import ExportSettings, ImportSettings
from stepwell.errors import BadRequest
from stepwell.exports.file_source import FileSource
from stepwell.exports.file_target import format_of, open_target
from stepwell.exports.import_run import import_groups
from stepwell.exports.pool_source import list_pool, read_groups
from stepwell.exports.preferences import PreferenceShape
from stepwell.exports.progress import TransferProgress
from stepwell.exports.selection import Selection
from stepwell.exports.sft import SftShape
from stepwell.exports.shapes import ExportShape, StepsShape
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.client import PoolClient
from stepwell.steps.groups import StepGroup, split_by_size
from stepwell.steps.step import Exactness

log = logging.getLogger("stepwell.exports")

PAGE_BYTES = 2**24
"""Bytes written at once: a row group of Parquet."""
Say: TypeAlias = Callable[[str], None]


async def run_export(settings: ExportSettings, pool: PoolClient | None, decode: Decode | None, say: Say) -> None:
    """From the pool, or without one from files."""
    shape = make_shape(settings, decode)
    selection = make_selection(settings)
    with open_target(settings.to, settings.format or format_of(settings.to), shape) as target:
        groups: AsyncIterable[StepGroup]
        listed = None
        if pool is None:
            groups = selection.of_groups(FileSource(settings.from_ or "").groups())
        else:
            listing = await list_pool(pool, selection)
            listed, groups = len(listing), read_groups(pool, listing)
        progress = TransferProgress(total=settings.limit or listed)
        wanted = groups if settings.limit is None else _first_trajectories(groups, settings.limit)
        async for page in split_by_size(wanted, PAGE_BYTES):
            target.write(page)
            progress.add(page, target.nbytes)
        summary = progress.close()
        if target.rows == 0:
            raise BadRequest(f"nothing was written: no row matches the filters and the shape ({summary})")
    say(f"wrote {settings.to}: {target.rows:,} rows of {summary}")
    if listed is not None and settings.limit is None and progress.trajectories < listed:
        say(f"{listed - progress.trajectories:,} trajectories left the pool before they were read")


async def run_import(settings: ImportSettings, pool: PoolClient, say: Say) -> None:
    progress = TransferProgress()
    groups = Selection().of_groups(FileSource(settings.path).groups())
    report = await import_groups(pool, groups, settings.channel, progress)
    say(f"read {settings.path}: {progress.close()}")
    say(f"steps: {report.text()}")
    for cause, count in report.dropped.items():
        if count:
            log.warning("the pool dropped %d steps during the import, cause %s: see its limits", count, cause)


def make_shape(settings: ExportSettings, decode: Decode | None) -> ExportShape:
    if settings.shape == "sft":
        return SftShape(decode, settings.best)
    if settings.shape == "preferences":
        return PreferenceShape(decode, settings.margin)
    return StepsShape()


def make_selection(settings: ExportSettings) -> Selection:
    filters = settings.model_dump(include=set(Selection.__slots__), exclude_none=True)
    read: Mapping[str, Callable[[Any], object]] = {
        "state": TrajectoryState,
        "min_exactness": Exactness,
        "since": datetime.timestamp,
        "until": datetime.timestamp,
    }
    return Selection(**filters | {name: read[name](filters[name]) for name in read.keys() & filters.keys()})


async def _first_trajectories(groups: AsyncIterable[StepGroup], limit: int) -> AsyncIterator[StepGroup]:
    """The last group may be cut."""
    left = limit
    async for group in groups:
        trajectories = group.trajectories()[:left]
        left -= len(trajectories)
        yield group.only(trajectories)
        if left == 0:
            return
