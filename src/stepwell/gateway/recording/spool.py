"""The spool: a copy on disk of the steps that a gateway holds for the pool, so that they outlive the gateway.

- `add` and `remove` never wait. The spool's own thread writes, some milliseconds of changes at a time.
- A step is on disk until it is removed. The steps that an earlier process left are sent again.
- A step that is released is on disk only, until it is recalled. So more steps can wait than fit into memory. Beyond
  `max_bytes`, released steps are given up.
- While a spool is open, no other process can open its file. The lock ends with the process.
- A damaged file is set aside; the rows that can be read are copied to a new file.

A kill -9 of the gateway costs the steps of the last milliseconds, which the thread has not written. A loss of power may
cost more, because the disk is not synced at every change. A step may be sent again after a kill; the pool takes it
once. If the disk fails, the copies are lost, not the steps in memory.
"""

import contextlib
import logging
import queue
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4
from zlib import crc32

from stepwell.common.sqlite_file import open_wal, set_aside_damaged
from stepwell.errors import StepwellError
from stepwell.steps.columns import from_bytes, to_bytes
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

GATHER_SECONDS = 0.005
"""How long changes are gathered. A step that comes and goes within this time is never written."""
MAX_ROW = 64
"""Steps in one row. A row is deleted when its last step is removed."""
TABLE = "CREATE TABLE IF NOT EXISTS messages (n INTEGER PRIMARY KEY, packed BLOB, checksum INTEGER)"
LOG_SIZE = 64 * 2**20
"""Bytes that SQLite's write-ahead log may keep on disk while it is empty."""
MAX_BYTES = 16 * 2**30
"""Bytes of packed steps on disk."""
MAX_FOUND = 256 * 2**20
"""Bytes that are read at the start, of what an earlier process left."""
LOCK_TIMEOUT = 1.0
"""Seconds to wait until an earlier process closes the file."""
LOG_INTERVAL = 1.0
"""Seconds between two log lines about a disk that fails."""


class Change(Enum):
    ADD = "add"
    REMOVE = "remove"
    RELEASE = "release"


class SpoolChange(NamedTuple):
    steps: Sequence[Step]
    what: Change


class SpoolRecall(NamedTuple):
    nbytes: int
    deliver: Callable[[list[Step]], object]


class Spool:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, *, most_found: int = MAX_FOUND) -> None:
        """StepwellError if another process has the file open, or if it cannot be used. Of what an earlier process left,
        `most_found` bytes are read at once."""
        self.unwritten = 0
        """Steps that could not be written."""
        self.on_given_up: Callable[[list[str]], object] = lambda _: None
        """Called in the spool's thread with the trajectory of each released step that is not on disk."""
        self._max_bytes = max_bytes
        self._file = SpoolFile(path, most_found)
        self._changes: queue.SimpleQueue[SpoolChange | SpoolRecall | None] = queue.SimpleQueue()
        self._rows: dict[Step, int] = {}
        """The row of each step."""
        self._left: dict[int, int] = {}
        """How many steps of a row are not removed."""
        self._spent: list[int] = []
        """Rows to delete."""
        self._released = {row: dict(steps) for row, steps in self._file.unread.items()}
        """By row, oldest first: the trajectories of the steps that are on disk only, by the steps' uids."""
        for row, steps in self._file.found.items():
            self._keep(row, steps)
        for row, uids in self._file.unread.items():
            self._left[row] = len(uids)
        self._last_row = max(self._left, default=0)
        self._thread = threading.Thread(target=self._write_changes, name="stepwell-spool", daemon=True)
        self._thread.start()

    @property
    def gateway(self) -> str:
        """The name by which the pool knows the gateway. It stays the same when the gateway is started again."""
        return self._file.gateway

    @property
    def found_on_disk(self) -> Counter[str]:
        """How many further steps an earlier process left, by trajectory. They are to be recalled."""
        return Counter(uid for uids in self._file.unread.values() for uid in uids.values())

    def take_leftovers(self) -> list[Step]:
        """The oldest steps that an earlier process did not send."""
        leftovers = [step for steps in self._file.found.values() for step in steps]
        self._file.found.clear()
        return leftovers

    def add(self, steps: Sequence[Step]) -> None:
        self._changes.put(SpoolChange(steps, Change.ADD))

    def remove(self, steps: Sequence[Step]) -> None:
        """The steps were delivered or given up."""
        self._changes.put(SpoolChange(steps, Change.REMOVE))

    def release(self, steps: Sequence[Step]) -> None:
        """The steps are no longer in memory."""
        self._changes.put(SpoolChange(steps, Change.RELEASE))

    def recall(self, nbytes: int, deliver: Callable[[list[Step]], object]) -> None:
        """Read the oldest released steps, about so many bytes. `deliver` is called with them in the spool's thread."""
        self._changes.put(SpoolRecall(nbytes, deliver))

    def close(self) -> None:
        """Write the last changes and close the file."""
        self._changes.put(None)
        self._thread.join()
        self._file.close()

    def _write_changes(self) -> None:
        is_open = True
        while is_open:
            changes = [self._changes.get()]
            time.sleep(GATHER_SECONDS)
            while not self._changes.empty():
                changes.append(self._changes.get())
            is_open = None not in changes
            made = [change for change in changes if isinstance(change, SpoolChange)]
            fresh = self._sort(made)
            if self._spent and self._file.delete(self._spent):
                self._spent.clear()
            self._insert(fresh)
            self._release_steps([step for change in made if change.what is Change.RELEASE for step in change.steps])
            for change in changes:
                if isinstance(change, SpoolRecall):
                    change.deliver(self._read_released(change.nbytes))

    def _sort(self, changes: Sequence[SpoolChange]) -> list[Step]:
        """Returns the steps to write. Rows without steps are added to `_spent`."""
        fresh: dict[Step, None] = {}
        for steps, what in changes:
            if what is Change.ADD:
                fresh.update(dict.fromkeys(steps))
            elif what is Change.REMOVE:
                for step in steps:
                    if step in fresh:
                        del fresh[step]
                    elif step in self._rows:
                        self._discard(self._rows.pop(step))
        return list(fresh)

    def _release_steps(self, steps: Sequence[Step]) -> None:
        given_up = []
        for step in steps:
            row = self._rows.pop(step, None)
            if row is not None and self._file.nbytes <= self._max_bytes:
                self._released.setdefault(row, {})[step.uid] = step.trajectory_uid
                continue
            given_up.append(step.trajectory_uid)
            if row is not None:
                self._discard(row)
        if given_up:
            self.on_given_up(given_up)

    def _read_released(self, nbytes: int) -> list[Step]:
        recalled: list[Step] = []
        while self._released and nbytes > 0:
            row = next(iter(self._released))
            wanted, (steps, size) = self._released.pop(row), self._file.read_row(row)
            found = [step for step in steps if wanted.pop(step.uid, None) is not None]
            self._rows.update(dict.fromkeys(found, row))
            recalled += found
            nbytes -= size
            if wanted:
                self.on_given_up(list(wanted.values()))
        return recalled

    def _insert(self, fresh: Sequence[Step]) -> None:
        for start in range(0, len(fresh), MAX_ROW):
            steps = fresh[start : start + MAX_ROW]
            self._last_row += 1
            if self._file.insert(self._last_row, steps):
                self._keep(self._last_row, steps)
            else:
                self.unwritten += len(steps)

    def _keep(self, row: int, steps: Sequence[Step]) -> None:
        self._rows.update(dict.fromkeys(steps, row))
        self._left[row] = len(steps)

    def _discard(self, row: int) -> None:
        self._left[row] -= 1
        if not self._left[row]:
            del self._left[row]
            self._spent.append(row)


class SpoolFile:
    """The spool's SQLite file: rows of packed steps."""

    def __init__(self, path: Path, most_found: int = MAX_FOUND) -> None:
        """StepwellError if another process has the file open, or if it cannot be used."""
        self.path = path
        self.nbytes = 0
        """Of all rows."""
        self.found: dict[int, list[Step]] = {}
        """The oldest steps that were in the file when it was opened, by row."""
        self.unread: dict[int, dict[str, str]] = {}
        """The other rows: the trajectory of each step, by the step's uid."""
        self._most_found = most_found
        self._sizes: dict[int, int] = {}
        self._logged_at = -LOG_INTERVAL
        try:
            self._open()
        except (OSError, sqlite3.OperationalError) as failure:
            raise StepwellError(_refusal(path, failure)) from None
        self.gateway = self._gateway_name()
        """The name of the gateway that has this spool, also of those before: what they left is its to send."""

    def insert(self, row: int, steps: Sequence[Step]) -> bool:
        """Returns whether it was written."""
        try:
            packed = to_bytes(steps)
        except (TypeError, ValueError) as failure:
            return self._failed(failure)
        if not self._change("INSERT INTO messages VALUES (?, ?, ?)", [(row, packed, crc32(packed))]):
            return False
        self._note_row(row, len(packed))
        return True

    def delete(self, rows: Sequence[int]) -> bool:
        if not self._change("DELETE FROM messages WHERE n = ?", [(row,) for row in rows]):
            return False
        for row in rows:
            self.nbytes -= self._sizes.pop(row, 0)
        return True

    def read_row(self, row: int) -> tuple[list[Step], int]:
        """The steps of a row and its bytes; none if it cannot be read."""
        try:
            (packed,) = self._db.execute("SELECT packed FROM messages WHERE n = ?", (row,)).fetchone()
            return from_bytes(packed), len(packed)
        except (TypeError, ValueError, sqlite3.Error) as failure:
            self._failed(failure)
            return [], 0

    def close(self) -> None:
        self._db.close()

    def _gateway_name(self) -> str:
        name = uuid4().hex
        try:
            self._db.execute("CREATE TABLE IF NOT EXISTS gateway (name TEXT)")
            kept = self._db.execute("SELECT name FROM gateway").fetchone()
            if kept is None:
                self._db.execute("INSERT INTO gateway VALUES (?)", (name,))
        except sqlite3.Error as failure:
            self._failed(failure)
            return name
        return name if kept is None else str(kept[0])

    def _change(self, statement: str, values: Sequence[tuple[int | bytes, ...]]) -> bool:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, values)
            self._db.execute("COMMIT")
        except sqlite3.Error as failure:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            return self._failed(failure)
        return True

    def _failed(self, failure: Exception) -> bool:
        if time.monotonic() - self._logged_at >= LOG_INTERVAL:
            self._logged_at = time.monotonic()
            log.error("spool %s cannot be written, new steps are only in memory: %s", self.path, failure)
        return False

    def _open(self) -> None:
        try:
            self._db = self._open_file()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as damage:
            if self.unread:  # all that can be read is copied
                self.found, self.unread, self.nbytes, self._most_found = {}, {}, 0, sys.maxsize
                with contextlib.suppress(sqlite3.DatabaseError):
                    self._open_file()
            self._replace_damaged(damage)

    def _open_file(self) -> sqlite3.Connection:
        db = open_wal(self.path, exclusive=True, lock_timeout=LOCK_TIMEOUT)
        try:
            db.execute(f"PRAGMA journal_size_limit = {LOG_SIZE}")
            db.executescript(f"BEGIN IMMEDIATE; {TABLE}; COMMIT")
            self._read(db)
        except BaseException:
            db.close()
            raise
        return db

    def _read(self, db: sqlite3.Connection) -> None:
        """Read every row that can be read. Raises DatabaseError afterwards if some rows cannot."""
        unreadable = 0
        for row, packed, checksum in db.execute("SELECT n, packed, checksum FROM messages ORDER BY n"):
            try:
                if crc32(packed) != checksum:
                    raise ValueError
                steps = from_bytes(packed)
            except (TypeError, ValueError):
                unreadable += 1
                continue
            self._note_row(row, len(packed))
            if self.nbytes <= self._most_found:
                self.found[row] = steps
            else:
                self.unread[row] = {step.uid: step.trajectory_uid for step in steps}
        if unreadable:
            raise sqlite3.DatabaseError(f"{unreadable} rows are not what was written, or are of another version")

    def _note_row(self, row: int, nbytes: int) -> None:
        self._sizes[row] = nbytes
        self.nbytes += nbytes

    def _replace_damaged(self, damage: sqlite3.DatabaseError) -> None:
        """Set the file aside and write the rows that were read to a new one."""
        aside = set_aside_damaged(self.path)
        steps = sum(len(found) for found in self.found.values())
        log.error(
            "spool %s is damaged: %s; %d steps could be read, it is set aside as %s", self.path, damage, steps, aside
        )
        self._db = self._open_file()
        for row, found in self.found.items():
            self.insert(row, found)


def _refusal(path: Path, failure: OSError | sqlite3.OperationalError) -> str:
    if getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return f"spool {path} is in use by another gateway; give each gateway a file of its own"
    return f"spool {path} cannot be used: {failure}"
