"""`stepwell forget`: everything of one person, or all that is too old, is deleted. A receipt says what was removed."""

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from stepwell.commands.sections import Duration, Listed, PoolSection, join_pool
from stepwell.common.command_line import say
from stepwell.common.files import replacing_file
from stepwell.common.imports import require
from stepwell.errors import BadRequest
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.archive_files import FOLDER, ArchiveFiles
from stepwell.pool.slices.forgetting import (
    FindOverdue,
    Forget,
    ForgetKeptBack,
    ForgetOverdue,
    Overdue,
    RowTest,
    merge_receipts,
)
from stepwell.pool.state.tombstones import AGE, OLDER_THAN, Tombstone, Tombstones

EXTRA = "arrow"
HOW_TO_DELETE = (
    "they are too old by the clock, and the pool has not run for so long since they came. If the clock is right: "
    "stepwell forget --overdue --confirm"
)


class ForgetSettings(PoolSection, env_prefix="STEPWELL_FORGET_"):
    """Delete everything of one person, or all that is too old, for good: from the pool, its journals, its archive and
    the gateways' spools.

    Nothing of that person is recorded afterwards. The command can be repeated; it goes on where it was.
    """

    examples = (
        "stepwell forget --subject user-4711 --receipt receipt.json",
        "stepwell forget --older-than 30d --receipt receipt.json",
    )

    subject: str | None = Field(default=None, min_length=1)
    """The user of a session, or what the metadata of a trajectory names as its subject. Other users of this machine can
    read a command line; the environment variable STEPWELL_FORGET_SUBJECT is private."""
    older_than: Duration | None = None
    """Instead of a subject: everything whose first call began longer ago than this, 30d for example; and data that is
    older than the retention that it was opened with."""
    overdue: bool = False
    """Instead of a subject: show data that the pool's retention keeps though it is too old by the wall clock, because
    the pool has not run for so long since it came: the pool was off, or the clock is wrong."""
    confirm: bool = False
    """Delete what --overdue shows: the clock is right."""
    archive: Listed = ()
    """Further folders of Parquet files to clean, besides the archive of the pool: exports of --shape steps, copies,
    older archives. Separated by commas."""
    receipt: str | None = None
    """File for the receipt, in JSON; without it, it is printed."""

    @model_validator(mode="after")
    def _names_one_thing(self) -> Self:
        if (self.subject is not None) + (self.older_than is not None) + self.overdue != 1:
            raise ValueError("say either --subject or --older-than, or --overdue")
        if self.confirm and not self.overdue:
            raise ValueError("--confirm belongs to --overdue")
        return self


def run_forget(settings: ForgetSettings) -> None:
    pool = join_pool(settings)
    if settings.overdue:
        say(asyncio.run(forget_kept_back(pool, confirm=settings.confirm)))
        return
    receipt = asyncio.run(_forget(pool, settings))
    text = json.dumps(receipt, indent=2)
    if settings.receipt is None:
        say(text)
        return
    with replacing_file(Path(settings.receipt)) as file:
        file.write(f"{text}\n".encode())
    say(f"forgotten; the receipt is in {settings.receipt}")


async def _forget(pool: PoolClient, settings: ForgetSettings) -> dict[str, Any]:
    if settings.subject is not None:
        return await forget(pool, settings.subject, settings.archive)
    assert settings.older_than is not None, "the settings have one of both"
    return await forget_overdue(pool, settings.older_than, settings.archive)


async def forget(pool: PoolClient, subject: str, folders: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the receipt, in plain values."""
    receipts = await pool.ask_long(Forget(subject))
    plan = await pool.shards.plan()
    tombstones = Tombstones()
    tombstones.key = plan.uid.encode()
    tombstones.names.update(*(receipt.names for receipt in receipts))
    further = await _clean(folders, Tombstone(tombstones.digest(subject), time.time()), tombstones)
    return {**merge_receipts(receipts, time.time()), "further_archives": further}


async def forget_overdue(pool: PoolClient, seconds: float, folders: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the receipt, in plain values."""
    receipts = await pool.ask_long(ForgetOverdue(seconds))
    too_old = Tombstone(AGE, time.time(), removed={OLDER_THAN: seconds})
    further = await _clean(folders, too_old, Tombstones())
    return {**merge_receipts(receipts, time.time()), "further_archives": further}


async def forget_kept_back(pool: PoolClient, *, confirm: bool) -> str:
    """Lists the data that the retention keeps though it is too old by the clock. With `confirm`, it is deleted. Returns
    words."""
    found = [overdue for overdue in await pool.ask_long(FindOverdue()) if overdue.count]
    if not found:
        return "nothing: the retention has deleted all that is too old"
    if confirm:
        await pool.ask_long(ForgetKeptBack())
    return "\n".join((*map(_told, found), "deleted" if confirm else HOW_TO_DELETE))


def _told(overdue: Overdue) -> str:
    since, now = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC" for at in (overdue.since, overdue.clock))
    counts = f"{overdue.trajectories} trajectories in the pool and {overdue.archived} in the archive"
    return f"{overdue.shard}: {counts}, the oldest of {since}; its clock says {now}"


async def _clean(folders: Sequence[str], tombstone: Tombstone, tombstones: Tombstones) -> dict[str, Any]:
    return {folder: await asyncio.to_thread(clean_folder, folder, tombstone, tombstones) for folder in folders}


def clean_folder(url: str, tombstone: Tombstone, tombstones: Tombstones) -> dict[str, Any]:
    """Remove rows from the Parquet files of a folder. Returns what was removed from each."""
    fs, folder = require("fsspec", EXTRA).core.url_to_fs(url)
    if not fs.isdir(folder):
        raise BadRequest(f"{url} is not a folder")
    removed = dict[str, Any]()
    for place in (folder, f"{folder}/data", f"{folder}/{FOLDER}"):
        files = ArchiveFiles(fs, place)
        for file in files.files():
            found = files.find(file, RowTest(tombstone, tombstones).is_removed)
            if found is not None:
                digests = [tombstones.digest(uid) for uid, _ in found.names]
                tombstones.names.update(digests)
                tombstone.removed.setdefault("trajectories", {}).update(dict.fromkeys(digests))
                before, is_written = files.digest(file), files.write_without(found)
                files.replace(found, is_written)
                after = files.digest(file)
                listed = {"rows": found.rows, "sha256_before": before, "sha256_after": after}
                removed[file.removeprefix(folder).strip("/")] = listed
    return removed
