"""Writes trained groups and late rewards to Parquet files, which trainers and data tools read. Needs the extra `arrow`.

- The rows of a group or late reward stay in the journal until its file is complete.
- A group is in exactly one file, with the steps that its trainer left out.
- A file is written under a temporary name. One transaction then removes the rows and notes the file. Then the file gets
  its final name. File and folder are on disk before the rows are removed, and the name before the note is: a power
  failure leaves a group in the journal or in the archive. The disk is waited for once a file, not once a group.
- Files are written and renamed in a thread, one after the other. The shard's loop never waits for them.
- A failure of any kind is counted, and what was to be written is tried again. Meanwhile groups wait, up to a number of
  bytes. Beyond that the oldest are dropped from the archive, and counted.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from stepwell.common.files import make_folder, sync_paths, temporary_name
from stepwell.common.imports import install_command
from stepwell.errors import BadRequest
from stepwell.pool.api.stats import ArchiveStats
from stepwell.pool.shard.archive_files import FOLDER as LATE_REWARDS
from stepwell.pool.shard.archive_files import FOLDER as LINEAGE
from stepwell.pool.shard.archive_files import LateReward, late_rewards_table, lineage_table
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.shipment import group_rows, ship
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.arrow import columns_to_arrow
from stepwell.steps.step import ids_array

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("stepwell.pool")

T = TypeVar("T")

GROUPS_PER_FILE, ROWS_PER_FILE = 256, 10_000
SECONDS_PER_FILE = 300.0
"""A file is written when so many groups or side rows wait, or when the oldest has waited so long."""
MAX_WAITING_BYTES = 2**30
"""Bytes of groups that wait, as stored, unless the pool has a limit of its own."""
RETRY_PAUSE = 5.0
"""Seconds after a failure until the next attempt."""


@dataclass(slots=True)
class SideRows(Generic[T]):
    """Rows of the journal that move to files of their own, beside the groups."""

    folder: str
    read: Callable[[], list[tuple[int, T]]]
    """The committed ones, each with its number."""
    remove: Callable[[int], None]
    """All up to that number."""
    table: "Callable[[Sequence[T]], pyarrow.Table]"
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.read())


class ParquetArchive:
    def __init__(
        self,
        url: str,
        shard: str,
        journal: ShardJournal,
        *,
        max_bytes: int | None = None,
        groups_per_file: int = GROUPS_PER_FILE,
        retry_pause: float = RETRY_PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `max_bytes` of groups wait."""
        try:
            import fsspec
            import pyarrow.parquet
        except ImportError as missing:
            raise BadRequest(f"--archive needs {missing.name}: {install_command('arrow')}") from None
        self._parquet = pyarrow.parquet
        self._shard = shard
        self._journal = journal
        self._max_bytes = MAX_WAITING_BYTES if max_bytes is None else max_bytes
        self._groups_per_file = groups_per_file
        self._retry_pause = retry_pause
        self._clock = clock
        journal.keeps_lineage = True
        self._rewards = SideRows(LATE_REWARDS, journal.late_rewards, journal.remove_late_rewards, late_rewards_table)
        self._lineage = SideRows(LINEAGE, journal.lineage, journal.remove_lineage, lineage_table)
        self._side_rows = (self._rewards, self._lineage)
        self._lineage_seen = journal.lineage_added
        self._waiting: deque[Group] = deque()
        """Groups that no file is being written for, the oldest first."""
        self._groups = self._bytes = 0
        """All groups that are not in a file yet."""
        self._waiting_since: float | None = None
        self._pause_until = 0.0
        self._has_noted = bool(journal.archived())
        """Some files are written and may still have their temporary name."""
        self._work: Future[None] | None = None
        """What the thread does now, and what follows when it is done or has failed."""
        self._on_success: Callable[[], None] = _nothing
        self._on_failure: Callable[[], None] = _nothing
        self._files = self._failures = self._dropped = 0
        self.is_paused = False
        """No new file is begun."""
        self._fs: Any
        self._fs, self._folder = fsspec.core.url_to_fs(url)

    def add_late_reward(self, reward: LateReward) -> None:
        self._journal.add_late_reward(reward)
        self._rewards.count += 1

    def stats(self) -> ArchiveStats:
        return ArchiveStats(
            waiting_groups=self._groups,
            waiting_bytes=self._bytes,
            files=self._files,
            failures=self._failures,
            dropped_groups=self._dropped,
        )

    @property
    def has_work(self) -> bool:
        """Does anything wait that is not in the archive yet?"""
        return bool(self._groups or self._rows_wait or self._has_noted or self._work)

    @property
    def _rows_wait(self) -> int:
        return sum(side.count for side in self._side_rows)

    def poll(self) -> None:
        """Take note of what the thread has done, and give it the next work if some is due. Returns at once."""
        self._collect()
        self._finish()
        if self._work is not None or self._clock() < self._pause_until:
            return
        if self.is_paused:
            if self._has_noted:
                self._rename_noted_files()
            return
        groups, rows = len(self._waiting), self._rows_wait
        if not groups and not rows:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        waited = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
        if self._has_noted:
            self._rename_noted_files()
        elif groups >= self._groups_per_file or (groups and waited >= SECONDS_PER_FILE):
            self._write_groups()
        elif rows >= ROWS_PER_FILE or (rows and waited >= SECONDS_PER_FILE):
            self._write_rows(max(self._side_rows, key=lambda side: side.count))

    @property
    def is_at_rest(self) -> bool:
        """All files that were begun are written and have their names."""
        return self._work is None and not self._has_noted

    @property
    def place(self) -> tuple[Any, str]:
        """The file system, and the folder in it."""
        return self._fs, self._folder

    def remove_waiting(self, is_wanted: Callable[[Trajectory], bool]) -> list[Trajectory]:
        """Take trajectories out of the groups that wait, and out of the journal. Call it at rest."""
        self._collect()
        removed = [found for group in self._waiting for found in group.trajectories.values() if is_wanted(found)]
        for trajectory in removed:
            group = trajectory.group
            self._journal.remove_trajectory(trajectory)
            del group.trajectories[trajectory.uid]
            group.nbytes -= trajectory.nbytes
            self._bytes -= trajectory.nbytes
        for group in [group for group in self._waiting if not group.trajectories]:
            self._waiting.remove(group)
            self._remove_rows([group])
        return removed

    def recount_late_rewards(self) -> None:
        """Some were removed from the journal."""
        self._rewards.count = len(self._rewards.read())

    def flush(self) -> None:
        """Write everything that waits, and wait for it. It stops at the first failure."""
        self._journal.commit_rows()
        self._collect()
        while True:
            failures = self._failures
            self._wait()
            if self._has_noted:
                self._rename_noted_files()
            elif self._waiting:
                self._write_groups()
            elif self._rows_wait:
                self._write_rows(max(self._side_rows, key=lambda side: side.count))
            else:
                return
            self._wait()
            if self._failures > failures:
                return

    # -- what the loop does ------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take the groups that left the pool. Beyond the limit, the oldest are dropped."""
        self._lineage.count += self._journal.lineage_added - self._lineage_seen
        self._lineage_seen = self._journal.lineage_added
        for group in self._journal.retired:
            self._waiting.append(group)
            self._groups += 1
            self._bytes += group.nbytes
        self._journal.retired.clear()
        while self._bytes > self._max_bytes and self._waiting:
            self._remove_rows([self._waiting.popleft()])
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:
                log.error("%d groups are dropped from the archive %s: too many wait", self._dropped, self._folder)

    def _remove_rows(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._groups -= 1
            self._bytes -= group.nbytes
            self._journal.remove_group(group)
            group.dissolve()

    def _write_groups(self) -> None:
        groups = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._groups_per_file))]
        file = self._new_file(self._folder, groups[0].seq)
        self._start(
            partial(self._write, file, partial(_groups_table, groups)),
            partial(self._groups_are_written, file, groups),
            partial(self._waiting.extendleft, groups[::-1]),
        )

    def _groups_are_written(self, file: str, groups: Sequence[Group]) -> None:
        self._remove_rows(groups)
        self._note(file)

    def _write_rows(self, side: "SideRows[Any]") -> None:
        numbers, rows = zip(*side.read(), strict=True)
        file = self._new_file(f"{self._folder}/{side.folder}", numbers[0])
        self._start(
            partial(self._write, file, partial(side.table, rows)),
            partial(self._rows_are_written, side, file, numbers[-1], len(rows)),
        )

    def _rows_are_written(self, side: "SideRows[Any]", file: str, last: int, count: int) -> None:
        side.remove(last)
        side.count -= count
        self._note(file)

    def _note(self, file: str) -> None:
        self._journal.note_archived(file)
        self._journal.commit_rows()
        self._has_noted, self._waiting_since = True, None
        self._files += 1

    def _rename_noted_files(self) -> None:
        files = self._journal.archived()
        self._start(partial(self._rename, files), partial(self._files_are_renamed, files))

    def _files_are_renamed(self, files: Sequence[str]) -> None:
        for file in files:
            self._journal.remove_archived(file)
        self._journal.commit_rows()
        self._has_noted = False

    def _start(
        self, work: Callable[[], None], on_success: Callable[[], None], on_failure: Callable[[], None] | None = None
    ) -> None:
        self._on_success, self._on_failure = on_success, on_failure or _nothing
        self._work = Future()
        threading.Thread(target=_do, args=(work, self._work), name="archive", daemon=True).start()

    def _finish(self) -> None:
        if self._work is None or not self._work.done():
            return
        failure, self._work = self._work.exception(), None
        if failure is None:
            self._on_success()
            return
        self._on_failure()
        self._failures += 1
        self._pause_until = self._clock() + self._retry_pause
        text = "%d groups and %d other rows wait: the archive %s cannot be written: %s: %s"
        details = (self._folder, type(failure).__name__, failure)
        log.error(text, self._groups, self._rows_wait, *details)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.exception()
        self._finish()

    def _new_file(self, folder: str, number: int) -> str:
        return f"{folder}/{self._shard}-{number:012d}-{uuid4().hex[:8]}.parquet"

    # -- what the thread does ----------------------------------------------------------------------------------------

    def _write(self, file: str, table: "Callable[[], pyarrow.Table]") -> None:
        folder, temporary = file.rpartition("/")[0], temporary_name(file)
        make_folder(self._fs, folder)
        try:
            with self._fs.open(temporary, "wb") as output:
                self._parquet.write_table(table(), output)
            sync_paths(self._fs, temporary, folder)
        except BaseException:
            with suppress(Exception):  # the next attempt has another name
                self._fs.rm(temporary)
            raise

    def _rename(self, files: Sequence[str]) -> None:
        """Give every noted file its final name, also files from before a crash."""
        for file in files:
            if self._fs.exists(temporary_name(file)):
                self._fs.mv(temporary_name(file), file)
        sync_paths(self._fs, *{file.rpartition("/")[0] for file in files if self._fs.exists(file)})


def _groups_table(groups: Sequence[Group]) -> "pyarrow.Table":
    rows = [group_rows(group, StoredStep.is_held) for group in groups]
    columns = ship([row for rows_of_group in rows for row in rows_of_group])
    sizes = ids_array([len(rows_of_group) for rows_of_group in rows])
    return columns_to_arrow(columns, sizes, {"source": [group.source for group in groups]})


def _do(work: Callable[[], None], done: "Future[None]") -> None:
    try:
        work()
    except Exception as failure:  # noqa: BLE001 - the loop counts it, and tries again
        done.set_exception(failure)
    else:
        done.set_result(None)


def _nothing() -> None: ...
