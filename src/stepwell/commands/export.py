"""`stepwell export` and `stepwell import`."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from stepwell.commands.sections import PoolSection, join_pool
from stepwell.common.command_line import say
from stepwell.common.tokenizers import Decode, load_decode
from stepwell.errors import BadRequest
from stepwell.exports.export_files import FileSource, format_of, open_target
from stepwell.exports.pool_transfer import TransferProgress, import_groups, list_pool, read_groups
from stepwell.exports.selection import Selection
from stepwell.exports.shapes import ExportShape, PreferenceShape, SftShape, StepsShape
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.client import PoolClient
from stepwell.steps.groups import StepGroup, split_by_size
from stepwell.steps.step import Exactness

log = logging.getLogger("stepwell.exports")

PAGE_BYTES = 2**24
"""Bytes written at once: a row group of Parquet."""
Say: TypeAlias = Callable[[str], None]


class ExportSettings(PoolSection, env_prefix="STEPWELL_EXPORT_"):
    """Write the steps of a running pool or of an archive to Parquet, JSONL or a dataset folder.

    An export changes nothing, and training continues. All given filters apply together.
    """

    examples = (
        "stepwell export --to steps.parquet",
        "stepwell export --from archive --to good.jsonl --reward-min 0.5 --since 2026-01-01",
        "stepwell export --from archive --to pairs.parquet --shape preferences --tokenizer-path Qwen/Qwen3-0.6B",
    )

    to: str
    """Path or fsspec URL to write: x.parquet, x.jsonl, or a folder for a dataset. It must not exist yet."""
    from_: str | None = Field(default=None, alias="from")
    """Read this instead of a pool: an archive, an earlier export, or a folder or file of them."""
    format: Literal["parquet", "jsonl", "dataset"] | None = None
    """File format; without it, the path's suffix decides. A dataset is a folder with data/*.parquet."""
    shape: Literal["steps", "sft", "preferences"] = "steps"
    """steps: all columns, can be imported again. sft: one example per step. preferences: pairs within groups."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer, for the texts of sft and preferences; without it, ids only."""
    best: int | None = Field(default=None, ge=1)
    """sft: take this number of trajectories from each group, those with the highest rewards."""
    margin: float = Field(default=0.0, ge=0)
    """preferences: the least difference between the two rewards of a pair; equal rewards make no pair."""
    channel: str | None = None
    """Only this channel."""
    source: str | None = None
    """Only this source: the name of an environment."""
    state: Literal["open", "waiting", "ready", "leased", "trained"] | None = None
    """Only this state, in a pool. Dropped and rejected trajectories are never exported."""
    mark: str | None = None
    """Only trajectories with this mark."""
    min_exactness: Literal["engine", "submitted", "retokenized"] | None = None
    """Only steps of this grade or better."""
    reward_min: float | None = None
    """Only rewards of at least this value."""
    reward_max: float | None = None
    """Only rewards of at most this value."""
    version_min: int | None = None
    """Only trajectories with a token of this policy version or a newer one."""
    version_max: int | None = None
    """Only trajectories with a token of this policy version or an older one."""
    since: datetime | None = None
    """Only trajectories started at this time or later: 2026-11-15, 2026-11-15T08:30, or seconds since 1970."""
    until: datetime | None = None
    """Only trajectories started at this time or earlier."""
    limit: int | None = Field(default=None, ge=1)
    """At most this number of trajectories."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.state is not None and self.from_ is not None:
            raise ValueError("--state selects a state in a pool; trajectories in files have no state")
        if self.best is not None and self.shape != "sft":
            raise ValueError("--best belongs to --shape sft")
        if self.margin and self.shape != "preferences":
            raise ValueError("--margin belongs to --shape preferences")
        return self


class ImportSettings(PoolSection, env_prefix="STEPWELL_IMPORT_"):
    """Send exported groups, or those of an archive, into a running pool. Groups that the pool has are skipped."""

    examples = ("stepwell import trained.parquet --channel replay",)

    path: CliPositionalArg[str]
    """Parquet or JSONL file, or folder or fsspec URL of them: an export of --shape steps, or an archive."""
    channel: str | None = None
    """Send all groups to this channel; without it, to the channel in the file. An archive names no channel."""


def run_export(settings: ExportSettings) -> None:
    pool = join_pool(settings) if settings.from_ is None else None
    decode = None if settings.tokenizer_path is None else load_decode(settings.tokenizer_path)
    asyncio.run(export_steps(settings, pool, decode, say))


def run_import(settings: ImportSettings) -> None:
    asyncio.run(import_steps(settings, join_pool(settings), say))


async def export_steps(settings: ExportSettings, pool: PoolClient | None, decode: Decode | None, say: Say) -> None:
    """Exports from the pool, or without one from files."""
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


async def import_steps(settings: ImportSettings, pool: PoolClient, say: Say) -> None:
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
