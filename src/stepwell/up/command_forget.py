"""`stepwell forget`: everything of one person is deleted, and a receipt says what was removed where."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepwell.common.atomic_files import replacing_file
from stepwell.common.optional import require
from stepwell.config.forgetting import ForgetSettings
from stepwell.errors import BadRequest
from stepwell.pool.api.forgetting import merge_receipts
from stepwell.pool.client import PoolClient
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.pool.shard.archive_files import ArchiveFiles
from stepwell.pool.shard.late_rewards import FOLDER
from stepwell.pool.state.tombstones import Tombstones
from stepwell.steps.step import JsonObject

EXTRA = "arrow"


def run_forget(settings: ForgetSettings) -> None:
    join_ray(settings.ray_address, settings.ray_namespace)
    pool = PoolClient(settings.data_pool_name, settings.ray_namespace)
    receipt = asyncio.run(forget(pool, settings.subject, settings.archive))
    text = json.dumps(receipt, indent=2)
    if settings.receipt is None:
        sys.stdout.write(f"{text}\n")
        return
    with replacing_file(Path(settings.receipt)) as file:
        file.write(f"{text}\n".encode())
    sys.stdout.write(f"forgotten; the receipt is in {settings.receipt}\n")


async def forget(pool: PoolClient, subject: str, folders: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the receipt, in plain values."""
    receipts = await pool.forget(subject)
    plan = await pool.shards.plan()
    tombstones = Tombstones()
    tombstones.key = plan.uid.encode()
    tombstones.names.update(*(receipt.names for receipt in receipts))
    further = {folder: await asyncio.to_thread(clean_folder, folder, subject, tombstones) for folder in folders}
    return {**merge_receipts(receipts, time.time()), "further_archives": further}


def clean_folder(url: str, subject: str, tombstones: Tombstones) -> dict[str, Any]:
    """Remove a subject's rows from the Parquet files of a folder. Returns what was removed from each."""
    fs, folder = require("fsspec", EXTRA).core.url_to_fs(url)
    if not fs.isdir(folder):
        raise BadRequest(f"{url} is not a folder")
    digest, removed = tombstones.digest(subject), dict[str, Any]()

    def is_removed(trajectory_uid: str, prompt_uid: str, metadata: JsonObject) -> bool:
        return tombstones.has_name(trajectory_uid, prompt_uid) or tombstones.is_of(digest, metadata)

    for place in (folder, f"{folder}/data", f"{folder}/{FOLDER}"):
        files = ArchiveFiles(fs, place)
        for file in files.files():
            found = files.find(file, is_removed)
            if found is not None:
                tombstones.names.update(map(tombstones.digest, (uid for uid, _ in found.names)))
                before, is_written = files.digest(file), files.write_without(found)
                files.replace(found, is_written)
                after = files.digest(file)
                listed = {"rows": found.rows, "sha256_before": before, "sha256_after": after}
                removed[file.removeprefix(folder).strip("/")] = listed
    return removed
