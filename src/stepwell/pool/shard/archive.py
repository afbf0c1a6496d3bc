"""Trained groups, and rewards that came after them, leave for Parquet files, which every trainer and data tool reads.
Needs the extra `arrow`.

What always holds: a group's rows stay in the journal until its file is whole, and a group is in one file, with the
steps that its trainer left out; the same for a late reward. A file is written under a passing name; then, in one
transaction, the rows go and the file's name is noted; then it gets its name.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from stepwell.common.atomic_files import temporary_name
from stepwell.errors import BadRequest
from stepwell.pool.shard.journal import SqliteJournal
from stepwell.pool.shard.late_rewards import FOLDER, LateReward, late_rewards_table
from stepwell.pool.state.records import Group
from stepwell.pool.state.shipment import group_rows, ship
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.arrow import columns_to_arrow
from stepwell.steps.step import ids_array

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("stepwell.pool")

GROUPS_A_FILE, REWARDS_A_FILE = 256, 10_000
SECONDS_A_FILE = 300.0
"""A file is written once there are so many groups, or late rewards, or the oldest has waited so long."""


class ParquetArchive:
    def __init__(self, url: str, shard: str, journal: SqliteJournal) -> None:
        try:
            import fsspec
            import pyarrow.parquet
        except ImportError as missing:
            raise BadRequest(f"--archive needs {missing.name}: pip install 'stepwell[arrow]'") from None
        self._parquet = pyarrow.parquet
        self._shard = shard
        self._journal = journal
        self._late_rewards = len(journal.late_rewards())
        self._waiting_since: float | None = None
        self._fs: Any
        self._fs, self._folder = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._folder, exist_ok=True)
        self._finish()

    def add_late_reward(self, reward: LateReward) -> None:
        self._journal.add_late_reward(reward)
        self._late_rewards += 1

    def keep_up(self) -> None:
        """Write what waits if it is time to."""
        groups, rewards = len(self._journal.retired), self._late_rewards
        if not groups and not rewards:
            self._waiting_since = None
            return
        self._waiting_since = self._waiting_since or time.monotonic()
        waited = time.monotonic() - self._waiting_since
        if groups >= GROUPS_A_FILE or rewards >= REWARDS_A_FILE or waited >= SECONDS_A_FILE:
            self.flush()

    def flush(self) -> None:
        """Write all that waits."""
        try:
            self._flush_groups(list(self._journal.retired))
            self._flush_late_rewards()
            self._waiting_since = None
        except OSError as failure:
            log.error(
                "%d groups and %d late rewards wait: the archive %s cannot be written: %s",
                len(self._journal.retired),
                self._late_rewards,
                self._folder,
                failure,
            )
            self._waiting_since = time.monotonic()

    def _flush_groups(self, groups: Sequence[Group]) -> None:
        if groups:
            parcels = [group_rows(group, StoredStep.is_held) for group in groups]
            columns = ship([row for parcel in parcels for row in parcel])
            sources = [group.source for group in groups]
            sizes = ids_array([len(parcel) for parcel in parcels])
            table = columns_to_arrow(columns, sizes, {"source": sources})
            self._write(table, self._folder, groups[0].seq)
            self._journal.forget_retired()
            self._commit()

    def _flush_late_rewards(self) -> None:
        waiting = self._journal.late_rewards()
        if waiting:
            (first, *_), rewards = zip(*waiting, strict=True)
            self._write(late_rewards_table(rewards), f"{self._folder}/{FOLDER}", first)
            self._journal.forget_late_rewards(waiting[-1][0])
            self._late_rewards = 0
            self._commit()

    def _write(self, table: "pyarrow.Table", folder: str, number: int) -> None:
        file = f"{folder}/{self._shard}-{number:012d}-{uuid4().hex[:8]}.parquet"
        self._fs.makedirs(folder, exist_ok=True)
        with self._fs.open(temporary_name(file), "wb") as output:
            self._parquet.write_table(table, output)
        self._journal.note_archived(file)

    def _commit(self) -> None:
        self._journal.commit_again()
        self._finish()

    def _finish(self) -> None:
        """Give every noted file its name; one from before a crash, too."""
        for file in self._journal.archived():
            if self._fs.exists(temporary_name(file)):
                self._fs.mv(temporary_name(file), file)
            self._journal.forget_archived(file)
