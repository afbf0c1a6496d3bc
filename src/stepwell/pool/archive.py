"""Trained groups leave for Parquet files, which every trainer and data tool reads. Needs the extra `arrow`.

What always holds: a group's rows stay in the journal until its file is whole, and a group is in one file, with the
steps that its trainer left out. A file is
written under a passing name; then, in one transaction, the rows go and the file's name is noted; then it gets its name.
"""

import logging
import time
from typing import Any
from uuid import uuid4

from stepwell.core.group import Group
from stepwell.core.held import HeldStep
from stepwell.core.shipping import group_rows, ship
from stepwell.errors import BadRequest
from stepwell.pool.batch import make_batch
from stepwell.pool.journal import SqliteJournal

log = logging.getLogger("stepwell.pool")

GROUPS_A_FILE = 256
SECONDS_A_FILE = 300.0
"""A file is written once there are so many groups, or the oldest has waited so long."""
PASSING = ".part"


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
        self._waiting_since: float | None = None
        self._fs: Any
        self._fs, self._folder = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._folder, exist_ok=True)
        self._finish()

    def keep_up(self) -> None:
        """Write a file if it is time to."""
        waiting = self._journal.retired
        if not waiting:
            self._waiting_since = None
            return
        self._waiting_since = self._waiting_since or time.monotonic()
        if len(waiting) >= GROUPS_A_FILE or time.monotonic() - self._waiting_since >= SECONDS_A_FILE:
            self.flush()

    def flush(self) -> None:
        """Write all that waits."""
        groups = list(self._journal.retired)
        if not groups:
            return
        file = f"{self._folder}/{self._shard}-{groups[0].seq:012d}-{uuid4().hex[:8]}.parquet"
        try:
            self._write(groups, file)
        except OSError as failure:
            log.error("%d groups wait: the archive %s cannot be written: %s", len(groups), self._folder, failure)
            self._waiting_since = time.monotonic()
            return
        self._journal.note_archived(file)
        self._journal.forget_retired()
        self._journal.commit_again()
        self._waiting_since = None
        self._finish()

    def _write(self, groups: list[Group], file: str) -> None:
        parcels = [group_rows(group, HeldStep.is_held) for group in groups]
        columns = ship([row for parcel in parcels for row in parcel], None)
        table = make_batch(columns, [len(parcel) for parcel in parcels]).to_arrow()
        with self._fs.open(file + PASSING, "wb") as output:
            self._parquet.write_table(table, output)

    def _finish(self) -> None:
        """Give every noted file its name; one from before a crash, too."""
        for file in self._journal.archived():
            if self._fs.exists(file + PASSING):
                self._fs.mv(file + PASSING, file)
            self._journal.forget_archived(file)
        self._journal.commit_again()
