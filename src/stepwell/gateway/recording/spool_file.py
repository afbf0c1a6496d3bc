"""The spool's SQLite file: rows of packed steps, the name of the gateway that writes it, and the pool they are for.

- While it is open, no other process can open it. The lock ends with the process.
- A damaged file is set aside; the rows that can be read are copied to a new file.
- Steps of another pool are set apart in a file beside it, which is a spool too.
"""

import contextlib
import logging
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4
from zlib import crc32

from stepwell.common.files import open_wal, scrub_database, set_aside_damaged
from stepwell.errors import StepwellError
from stepwell.gateway.recording.step_book import HeldStep, steps_of
from stepwell.steps.columns import from_bytes, to_bytes
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

TABLE = "CREATE TABLE IF NOT EXISTS messages (n INTEGER PRIMARY KEY, packed BLOB, checksum INTEGER)"
NAMES = "CREATE TABLE IF NOT EXISTS gateway (name TEXT); CREATE TABLE IF NOT EXISTS pool (uid TEXT)"
LOG_SIZE = 64 * 2**20
"""Bytes that SQLite's write-ahead log may keep on disk while it is empty."""
MAX_FOUND = 256 * 2**20
"""Bytes that are read at the start, of what an earlier process left."""
SCRUBBED_AT_START = 64 * 2**20
"""Bytes of rows up to which the file is written again at the start, without what is left of deleted rows: data
may have been removed from the pool while no gateway had the file open."""
LOCK_TIMEOUT = 1.0
"""Seconds to wait until an earlier process closes the file."""
LOG_INTERVAL = 1.0
"""Seconds between two log lines about a disk that fails."""


class SpoolFile:
    """The spool's SQLite file: rows of packed steps."""

    def __init__(self, path: Path, most_found: int = MAX_FOUND) -> None:
        """StepwellError if another process has the file open, or if it cannot be used."""
        self.path = path
        self.nbytes = 0
        """Bytes of all rows."""
        self.found: dict[int, list[HeldStep]] = {}
        """The steps that were in the file when it was opened, by row. Only those of the oldest rows are in memory."""
        self._most_found = most_found
        self._sizes: dict[int, int] = {}
        self._logged_at = -LOG_INTERVAL
        try:
            self._open()
        except (OSError, sqlite3.OperationalError) as failure:
            raise StepwellError(_refusal(path, failure)) from None
        self.gateway, self.pool_uid = self._names()
        """The name of the gateway that has this spool, also of those before: what they left is its to send. And the uid
        of the pool that the steps are for; empty if it is not known."""

    def insert(self, row: int, packed: bytes) -> bool:
        """Returns whether it was written."""
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

    def scrub(self) -> bool:
        """Remove what deleted rows have left in the file, and files that were set aside as damaged."""
        try:
            scrub_database(self._db)
            for damaged in self.path.parent.glob(f"{self.path.name}.damaged-*"):
                damaged.unlink()
        except (OSError, sqlite3.Error) as failure:
            return self._failed(failure)
        return True

    def close(self) -> None:
        self._db.close()

    def claim(self, pool_uid: str) -> None:
        self.pool_uid = pool_uid
        self._change("DELETE FROM pool", [()])
        self._change("INSERT INTO pool VALUES (?)", [(pool_uid,)])

    def set_apart(self, last_row: int) -> bool:
        """Move the rows up to that one to a spool of their pool, beside this file. False if that failed."""
        apart = self.path.with_name(f"{self.path.name}.{self.pool_uid}")
        rows = [row for row in self._sizes if row <= last_row]
        if not rows:
            return True
        try:
            self._copy_rows(apart, last_row)
        except (OSError, sqlite3.Error) as failure:
            log.error("the %d messages of another pool in spool %s stay there: %s", len(rows), self.path, failure)
            return False
        log.error(
            "spool %s had %d messages for another pool (%s). They are set apart: to deliver them, start a gateway with "
            "that pool and --spool %s",
            *(self.path, len(rows), self.pool_uid, apart),
        )
        return self.delete(rows)

    def _copy_rows(self, apart: Path, last_row: int) -> None:
        """A copy may be there already, after a kill. The pool takes each step once."""
        with contextlib.closing(open_wal(apart)) as db:
            db.executescript(f"{TABLE}; {NAMES}")
        self._db.execute("ATTACH ? AS apart", (str(apart),))
        try:
            self._db.execute("BEGIN IMMEDIATE")
            columns = "(packed, checksum) SELECT packed, checksum FROM main.messages WHERE n <= ? ORDER BY n"
            self._db.execute(f"INSERT INTO apart.messages {columns}", (last_row,))
            for table in ("gateway", "pool"):
                self._db.execute(f"DELETE FROM apart.{table}")
                self._db.execute(f"INSERT INTO apart.{table} SELECT * FROM main.{table}")
            self._db.execute("COMMIT")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("DETACH apart")

    def _names(self) -> tuple[str, str]:
        name, uid = uuid4().hex, ""
        try:
            self._db.executescript(NAMES)
            kept = self._db.execute("SELECT name FROM gateway").fetchone()
            if kept is None:
                self._db.execute("INSERT INTO gateway VALUES (?)", (name,))
            claimed = self._db.execute("SELECT uid FROM pool").fetchone()
            uid = "" if claimed is None else str(claimed[0])
        except sqlite3.Error as failure:
            self._failed(failure)
            return name, uid
        return name if kept is None else str(kept[0]), uid

    def _change(self, statement: str, values: Sequence[tuple[int | bytes | str, ...]]) -> bool:
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
            if self.nbytes > self._most_found:  # all that can be read is copied
                self.found, self.nbytes, self._most_found = {}, 0, sys.maxsize
                with contextlib.suppress(sqlite3.DatabaseError):
                    self._open_file()
            self._replace_damaged(damage)

    def _open_file(self) -> sqlite3.Connection:
        db = open_wal(self.path, exclusive=True, lock_timeout=LOCK_TIMEOUT)
        try:
            db.execute(f"PRAGMA journal_size_limit = {LOG_SIZE}")
            db.executescript(f"BEGIN IMMEDIATE; {TABLE}; COMMIT")
            self._read(db)
            if self.nbytes <= SCRUBBED_AT_START:
                with contextlib.suppress(sqlite3.OperationalError):  # a full disk, say
                    scrub_database(db)
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
            is_read = self.nbytes <= self._most_found
            self.found[row] = [
                HeldStep(step.uid, step.trajectory_uid, step if is_read else None, row=row) for step in steps
            ]
        if unreadable:
            raise sqlite3.DatabaseError(f"{unreadable} rows are not what was written, or are of another version")

    def _note_row(self, row: int, nbytes: int) -> None:
        self._sizes[row] = nbytes
        self.nbytes += nbytes

    def _replace_damaged(self, damage: sqlite3.DatabaseError) -> None:
        """Set the file aside and write the rows that were read to a new one."""
        aside = set_aside_damaged(self.path)
        self.nbytes = 0
        steps = sum(len(found) for found in self.found.values())
        log.error(
            "spool %s is damaged: %s; %d steps could be read, it is set aside as %s", self.path, damage, steps, aside
        )
        self._db = self._open_file()
        for row, found in self.found.items():
            self.insert(row, to_bytes(steps_of(found)))


def _refusal(path: Path, failure: OSError | sqlite3.OperationalError) -> str:
    if getattr(failure, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return f"spool {path} is in use by another gateway; give each gateway a file of its own"
    return f"spool {path} cannot be used: {failure}"
