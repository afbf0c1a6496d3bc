"""The journal of a shard as a SQLite file on the disk of its node.

- A commit is one transaction of the write-ahead log. With `sync=full` it returns when the disk has it.
- One process has the file open. It holds a lock, and it raised the file's epoch when it opened it: a commit under an
  older epoch fails.
"""

import fcntl
import logging
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from stepwell.common.sqlite_file import count_wal_frames, open_wal, set_aside_damaged
from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync
from stepwell.pool.shard.journal import (
    PUT_META,
    SCHEMA_VERSION,
    JournalDamaged,
    JournalFailed,
    ShardJournal,
    Statement,
)
from stepwell.pool.shard.journal_identity import JournalIdentity, missing

log = logging.getLogger("stepwell.pool")

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, info BLOB);
CREATE TABLE IF NOT EXISTS trajectories (number INTEGER PRIMARY KEY, group_seq INTEGER, info BLOB);
CREATE TABLE IF NOT EXISTS steps (
    number INTEGER PRIMARY KEY, trajectory INTEGER, base INTEGER, shared INTEGER, info BLOB, reward REAL,
    reward_source TEXT, reward_revision INTEGER, lease TEXT, shipped INTEGER, added BLOB, logprobs BLOB, mask BLOB,
    checksum INTEGER
);
CREATE TABLE IF NOT EXISTS leases (uid TEXT PRIMARY KEY, channel TEXT, expires_at REAL, gate BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT, how TEXT);
CREATE TABLE IF NOT EXISTS closed (n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT, revision INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS late_rewards (n INTEGER PRIMARY KEY AUTOINCREMENT, info BLOB);
CREATE TABLE IF NOT EXISTS audit (n INTEGER PRIMARY KEY AUTOINCREMENT, info BLOB);
CREATE TABLE IF NOT EXISTS archived (file TEXT PRIMARY KEY) WITHOUT ROWID;
"""
CHECKPOINT_PAGES = 4_096


class SqliteStore:
    def __init__(
        self,
        path: Path,
        identity: JournalIdentity | None = None,
        *,
        must_exist: bool = False,
        sync: JournalSync = JournalSync.FULL,
    ) -> None:
        """JournalRefused if the file is that of another pool or shard, or is not there though it must exist."""
        self.path = path
        self._sync = sync is JournalSync.FULL
        self.identity = identity
        self.name = str(path)
        self.torn_frames = 0
        self.written_at = _written_at(path)
        self._epoch = 0
        """Raised by every opening."""
        if must_exist and not (path.exists() and path.stat().st_size):
            raise JournalRefused(missing(str(path)))
        self._lock = self._take_lock()
        try:
            self.db = self._open()
        except BaseException:
            self._lock.close()
            raise

    def commit(self, statements: Iterable[Statement]) -> None:
        try:
            self.db.execute("BEGIN IMMEDIATE")
            if _read_number(self.db, "epoch") != self._epoch:
                raise JournalFailed(f"journal {self.path} was opened by another process")
            for sql, rows in statements:
                self.db.executemany(sql, rows)
            self.db.execute("COMMIT")
        except sqlite3.Error as failure:
            raise JournalFailed(f"journal {self.path} cannot be written: {failure}") from failure
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self.db.execute(query)
        except sqlite3.DatabaseError as failure:
            raise JournalDamaged(str(failure)) from failure

    def free_bytes(self) -> float:
        try:
            disk = os.statvfs(self.path.parent)
        except OSError:
            return math.inf
        return disk.f_bavail * disk.f_frsize

    def replace(self) -> str:
        self.db.close()
        aside = set_aside_damaged(self.path)
        self.db = self._open_file()
        return str(aside)

    def close(self) -> None:
        self.db.close()
        self._lock.close()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._open_file()
        except sqlite3.OperationalError as failure:
            raise JournalRefused(f"journal {self.path} cannot be opened: {failure}") from None
        except sqlite3.DatabaseError as failure:
            aside = set_aside_damaged(self.path)
            log.error(
                "journal %s is damaged, nothing can be read: %s; it is set aside as %s", self.path, failure, aside
            )
            return self._open_file()

    def _take_lock(self) -> BinaryIO:
        """Of a file beside the journal. The kernel releases it when the process ends."""
        path = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("ab")
        except OSError as failure:
            raise JournalRefused(f"journal {self.path} cannot be opened: {failure}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise JournalRefused(
                f"journal {self.path} is open in another process: end that shard, or use another --journal"
            ) from None
        return lock

    def _open_file(self) -> sqlite3.Connection:
        wal_frames = count_wal_frames(self.path)
        db = open_wal(self.path, sync=self._sync)
        try:
            recovered_frames = int(db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
            self.torn_frames = max(0, wal_frames - recovered_frames)
            db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            if _has_meta(db):
                self._check_schema(db)
                self._check_identity(db)
            db.executescript(TABLES)
            _upgrade(db)
            self._write_meta(db)
            if self._sync:
                _sync_folder(self.path.parent)
        except BaseException:
            db.close()
            raise
        return db

    def _check_schema(self, db: sqlite3.Connection) -> None:
        found = _read_number(db, "schema_version")
        if found > SCHEMA_VERSION:
            raise JournalRefused(
                f"journal {self.path} has schema version {found}, and this Stepwell reads up to {SCHEMA_VERSION}; "
                "use the newer Stepwell that wrote it, or another --journal"
            )

    def _check_identity(self, db: sqlite3.Connection) -> None:
        found = _read_identity(db)
        if self.identity is None or found is None:
            return
        why_not = self.identity.why_not(found)
        if why_not is not None:
            raise JournalRefused(f"journal {self.path} {why_not}")
        self.identity = found

    def _write_meta(self, db: sqlite3.Connection) -> None:
        """From here on, an earlier process cannot commit."""
        db.execute("BEGIN IMMEDIATE")
        self._epoch = max(self._epoch, _read_number(db, "epoch")) + 1
        values: dict[str, object] = {"schema_version": SCHEMA_VERSION, "epoch": self._epoch}
        if self.identity is not None:
            self.identity = self.identity.complete()
            values["identity"] = asdict(self.identity)
        db.executemany(PUT_META, ((key, orjson.dumps(value)) for key, value in values.items()))
        db.execute("COMMIT")


class SqliteJournal(ShardJournal):
    """A journal in a file of its own."""

    def __init__(
        self,
        path: Path,
        identity: JournalIdentity | None = None,
        *,
        closed_kept: int,
        must_exist: bool = False,
        sync: JournalSync = JournalSync.FULL,
    ) -> None:
        self.file = SqliteStore(path, identity, must_exist=must_exist, sync=sync)
        super().__init__(self.file, closed_kept=closed_kept)

    @property
    def db(self) -> sqlite3.Connection:
        return self.file.db


def _written_at(path: Path) -> float | None:
    files = [file for file in (path, path.with_name(path.name + "-wal")) if file.exists() and file.stat().st_size]
    return max((file.stat().st_mtime for file in files), default=None)


def read_identity(path: Path) -> tuple[JournalIdentity | None, int]:
    """Of a file that may be in use: whose journal it is, if it says so, and its epoch."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            return (_read_identity(db), _read_number(db, "epoch")) if _has_meta(db) else (None, 0)
    except sqlite3.Error:
        return None, 0  # what is damaged is seen when it is opened


def _has_meta(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is not None


def _read_identity(db: sqlite3.Connection) -> JournalIdentity | None:
    row = db.execute("SELECT value FROM meta WHERE key = 'identity'").fetchone()
    return JournalIdentity(**orjson.loads(row[0])) if row else None


def _sync_folder(folder: Path) -> None:
    """The name of a new file is on the disk with this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_number(db: sqlite3.Connection, key: str) -> int:
    """0 if there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return int(row[0]) if row else 0


def _upgrade(db: sqlite3.Connection) -> None:
    """Add columns that an older file lacks: the step filter of leases (version 2), the closed revision (version 3)."""
    if "gate" not in {name for _, name, *_ in db.execute("PRAGMA table_info(leases)")}:
        db.execute("""ALTER TABLE leases ADD COLUMN gate BLOB DEFAULT '["submitted", false]'""")
    if "revision" not in {name for _, name, *_ in db.execute("PRAGMA table_info(closed)")}:
        db.execute("ALTER TABLE closed ADD COLUMN revision INTEGER DEFAULT 0")
