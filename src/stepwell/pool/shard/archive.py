"""Writes trained groups and late rewards to Parquet files, which trainers and data tools read. Needs the extra `arrow`.

- The rows of a group or late reward stay in the journal until its file is complete.
- A group is in exactly one file, with the steps that its trainer left out.
- A file is written under a temporary name. One transaction then removes the rows and notes the file. Then the file gets
  its final name.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from stepwell.common.atomic_files import temporary_name
from stepwell.errors import BadRequest
from stepwell.pool.shard.journal import JournalFailed, ShardJournal
from stepwell.pool.shard.late_rewards import FOLDER, LateReward, late_rewards_table
from stepwell.pool.state.records import Group
from stepwell.pool.state.shipment import group_rows, ship
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.arrow import columns_to_arrow
from stepwell.steps.step import ids_array

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("stepwell.pool")

GROUPS_PER_FILE, REWARDS_PER_FILE = 256, 10_000
SECONDS_PER_FILE = 300.0
"""A file is written when so many groups or late rewards wait, or when the oldest has waited so long."""


class ParquetArchive:
    def __init__(
        self, url: str, shard: str, journal: ShardJournal, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            import fsspec
            import pyarrow.parquet
        except ImportError as missing:
            raise BadRequest(f"--archive needs {missing.name}: pip install 'stepwell[arrow]'") from None
        self._parquet = pyarrow.parquet
        self._shard = shard
        self._journal = journal
        self._clock = clock
        self._late_rewards = len(journal.late_rewards())
        self._waiting_since: float | None = None
        self._fs: Any
        self._fs, self._folder = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._folder, exist_ok=True)
        self._rename_noted_files()

    def add_late_reward(self, reward: LateReward) -> None:
        self._journal.add_late_reward(reward)
        self._late_rewards += 1

    def flush_if_due(self) -> None:
        groups, rewards = len(self._journal.retired), self._late_rewards
        if not groups and not rewards:
            self._waiting_since = None
            return
        self._waiting_since = self._waiting_since or self._clock()
        waited = self._clock() - self._waiting_since
        if groups >= GROUPS_PER_FILE or rewards >= REWARDS_PER_FILE or waited >= SECONDS_PER_FILE:
            self.flush()

    def flush(self) -> None:
        """Write everything that waits. What cannot be written is tried again later. JournalFailed is raised."""
        self._journal.commit_rows()
        try:
            self._flush_groups(list(self._journal.retired))
            self._flush_late_rewards()
            self._waiting_since = None
        except JournalFailed:
            raise
        except Exception as failure:  # noqa: BLE001 - object stores have errors of their own
            log.error(
                "%d groups and %d late rewards wait: the archive %s cannot be written: %s",
                len(self._journal.retired),
                self._late_rewards,
                self._folder,
                failure,
            )
            self._waiting_since = self._clock()

    def _flush_groups(self, groups: Sequence[Group]) -> None:
        if groups:
            rows = [group_rows(group, StoredStep.is_held) for group in groups]
            columns = ship([row for rows_of_group in rows for row in rows_of_group])
            sources = [group.source for group in groups]
            sizes = ids_array([len(rows_of_group) for rows_of_group in rows])
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
        self._journal.commit_rows()
        self._rename_noted_files()

    def _rename_noted_files(self) -> None:
        """Give every noted file its final name, also files from before a crash."""
        for file in self._journal.archived():
            if self._fs.exists(temporary_name(file)):
                self._fs.mv(temporary_name(file), file)
            self._journal.forget_archived(file)
        self._journal.commit_rows()
