"""`stepwell export` and `stepwell import`, once what they need has been handed in."""

import logging
from collections.abc import AsyncIterable, Callable
from datetime import datetime
from typing import TypeAlias

from stepwell.common.tokenizers import Decode
from stepwell.config.exports import ExportSettings, ImportSettings
from stepwell.errors import BadRequest
from stepwell.exports.export_run import chosen, export, limited
from stepwell.exports.file_source import Files
from stepwell.exports.file_target import format_of, opened
from stepwell.exports.formats import Shape, Steps
from stepwell.exports.import_run import PoolToFill, import_groups
from stepwell.exports.pool_source import list_pool, read_groups
from stepwell.exports.preferences import Preferences
from stepwell.exports.progress import TransferProgress
from stepwell.exports.selection import Choice
from stepwell.exports.sft import Imitation
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.watching import TrajectoryState
from stepwell.steps.groups import StepGroup
from stepwell.steps.step import Exactness
from stepwell.steps.tables import Tables

log = logging.getLogger("stepwell.exports")

Say: TypeAlias = Callable[[str], None]


async def run_export(
    settings: ExportSettings, pool: PoolReader | None, tables: Tables, decode: Decode | None, say: Say
) -> None:
    """From the pool, or without one from files."""
    shape = make_shape(settings, tables, decode)
    choice = make_choice(settings)
    with opened(settings.to, settings.format or format_of(settings.to), shape) as sink:
        groups: AsyncIterable[StepGroup]
        listed = None
        if pool is None:
            groups = chosen(Files(settings.from_ or "", tables).groups(), choice)
        else:
            listing = await list_pool(pool, choice)
            listed, groups = len(listing), read_groups(pool, listing)
        progress = TransferProgress(total=settings.limit or listed)
        await export(groups if settings.limit is None else limited(groups, settings.limit), sink, progress)
        words = progress.close()
        if sink.rows == 0:
            raise BadRequest(f"nothing was written: there is nothing of what was asked for ({words})")
    say(f"wrote {settings.to}: {sink.rows:,} rows of {words}")
    if listed is not None and settings.limit is None and progress.trajectories < listed:
        say(f"{listed - progress.trajectories:,} trajectories that the pool still knows by name had left it")


async def run_import(settings: ImportSettings, pool: PoolToFill, tables: Tables, say: Say) -> None:
    progress = TransferProgress()
    groups = chosen(Files(settings.path, tables).groups(), Choice())
    outcome = await import_groups(pool, groups, settings.channel, progress)
    say(f"read {settings.path}: {progress.close()}")
    say(f"steps: {outcome.words()}")
    for cause, count in outcome.lost.items():
        if count:
            log.warning("the pool has dropped %d steps meanwhile, cause %s: see its bounds", count, cause)


def make_shape(settings: ExportSettings, tables: Tables, decode: Decode | None) -> Shape:
    if settings.shape == "sft":
        return Imitation(decode, settings.best)
    if settings.shape == "preferences":
        return Preferences(decode, settings.margin)
    return Steps(tables)


def make_choice(settings: ExportSettings) -> Choice:
    return Choice(
        channel=settings.channel,
        source=settings.source,
        state=None if settings.state is None else TrajectoryState(settings.state),
        mark=settings.mark,
        min_exactness=None if settings.min_exactness is None else Exactness(settings.min_exactness),
        reward_min=settings.reward_min,
        reward_max=settings.reward_max,
        version_min=settings.version_min,
        version_max=settings.version_max,
        since=_seconds(settings.since),
        until=_seconds(settings.until),
    )


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()
