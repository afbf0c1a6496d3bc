"""The spool's SQLite file: rows of packed steps.

What always holds: as long as it is open, no other process can open it, and the lock goes with the process; a change is
in the file as a whole or not at all; a damaged file is set aside with what could still be read of it carried over.
"""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

from stepwell.common.sqlite_file import open_wal, set_aside_damaged
from stepwell.errors import StepwellError
from stepwell.steps.columns import from_bytes, to_bytes
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

TABLE = "CREATE TABLE IF NOT EXISTS messages (n INTEGER PRIMARY KEY, packed BLOB, checksum INTEGER)"
LOG_SIZE = 64 * 2**20
"""Bytes SQLite's write-ahead log may keep on disk while there is nothing in it."""
LOCK_TIMEOUT = 1.0
"""Seconds to wait for an earlier process to let go of the file."""
TOLD_EVERY = 1.0
"""Seconds between two lines about a disk that fails."""


class SpoolFile:
    def __init__(self, path: Path) -> None:
        """StepwellError if another process has it, or it cannot be used."""
        self.path = path
        self.found: dict[int, list[Step]] = {}
        """What was in it when it was opened, by row, oldest first."""
        self._told_at = -TOLD_EVERY
        try:
            self._open()
        except (OSError, sqlite3.OperationalError) as failure:
            raise StepwellError(_refusal(path, failure)) from None

    def insert(self, row: int, steps: Sequence[Step]) -> bool:
        """Whether the disk took it."""
        try:
            packed = to_bytes(steps)
        except (TypeError, ValueError) as failure:
            return self._failed(failure)
        return self._change("INSERT INTO messages VALUES (?, ?, ?)", [(row, packed, crc32(packed))])

    def delete(self, rows: Iterable[int]) -> bool:
        return self._change("DELETE FROM messages WHERE n = ?", [(row,) for row in rows])

    def close(self) -> None:
        self._db.close()

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
        if time.monotonic() - self._told_at >= TOLD_EVERY:
            self._told_at = time.monotonic()
            log.error("spool %s cannot be written, new steps are in memory alone: %s", self.path, failure)
        return False

    def _open(self) -> None:
        try:
            self._db = self._open_file()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as damage:
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
                self.found[row] = from_bytes(packed)
            except (TypeError, ValueError):
                unreadable += 1
        if unreadable:
            raise sqlite3.DatabaseError(f"{unreadable} rows are not what was written, or are of another version")

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
