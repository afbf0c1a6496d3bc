"""The journal of a shard as a SQLite file on the disk of its node.

- A commit is one transaction of the write-ahead log. With `sync=full` it returns when the disk has it.
- One process has the file open. It holds a lock, and it raised the file's epoch when it opened it: a commit under an
  older epoch fails.
"""

import fcntl
import heapq
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from stepwell.common.files import count_wal_frames, create_private, open_wal, set_aside_damaged, sync_path
from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.journal_store import (
    OLD,
    PUT_META,
    READ_EPOCH,
    READ_HEADER,
    JournalDamaged,
    JournalFailed,
    JournalHeader,
    JournalIdentity,
    Statement,
    Wait,
    mirrored,
    missing,
    of_both,
)

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, info BLOB);
CREATE TABLE IF NOT EXISTS trajectories (number INTEGER PRIMARY KEY, group_seq INTEGER, info BLOB);
CREATE TABLE IF NOT EXISTS steps (
    number INTEGER PRIMARY KEY, trajectory INTEGER, base INTEGER, shared INTEGER, info BLOB, reward REAL,
    reward_source TEXT, reward_revision INTEGER, lease TEXT, shipped INTEGER, added BLOB, logprobs BLOB, mask BLOB,
    checksum INTEGER, state_checksum INTEGER
);
CREATE TABLE IF NOT EXISTS leases (uid TEXT PRIMARY KEY, channel TEXT, expires_at REAL, gate BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT, how TEXT);
CREATE TABLE IF NOT EXISTS acknowledged (uid TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS closed (n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT, revision INTEGER DEFAULT 0,
    subject TEXT DEFAULT '');
CREATE TABLE IF NOT EXISTS late_rewards (n INTEGER PRIMARY KEY AUTOINCREMENT, info BLOB);
CREATE TABLE IF NOT EXISTS slices (n INTEGER PRIMARY KEY AUTOINCREMENT, slice TEXT, key TEXT, info BLOB,
    UNIQUE (slice, key));
CREATE TABLE IF NOT EXISTS archived (file TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lineage (n INTEGER PRIMARY KEY AUTOINCREMENT, info BLOB);
CREATE TABLE IF NOT EXISTS tombstones (digest TEXT PRIMARY KEY, info BLOB) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS steps_by_trajectory ON steps (trajectory);
"""
"""The index tells how many steps each trajectory has: so it is known after damage which trajectories lack some."""
KEYED_BY_TEXT = ("leases", "acknowledged", "archived", "tombstones")
MAX_KEY = 2**63 - 1
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
        self._wanted = identity
        self.header = JournalHeader()
        """As this process wrote it."""
        self.name = str(path)
        self.torn_frames = 0
        self.written_at = _written_at(path)
        if must_exist and not (path.exists() and path.stat().st_size):
            raise JournalRefused(missing(str(path), "mount its volume, or put a backup there"))
        self._lock = self._take_lock()
        try:
            self._use(self._open())
        except BaseException:
            self._lock.close()
            raise

    def _use(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.scrubber = SqliteScrub(self.path, db, self._writing)

    def commit(self, statements: Iterable[Statement]) -> None:
        with self._writing():
            for sql, rows in mirrored(statements, self.scrubber.moving):
                self.db.executemany(sql, rows)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self.db.execute("BEGIN IMMEDIATE")
            if int(self.db.execute(READ_EPOCH).fetchone()[0]) != self.header.epoch:
                raise JournalFailed(f"journal {self.path} was opened by another process")
            yield
            self.db.execute("COMMIT")
        except sqlite3.Error as failure:
            raise JournalFailed(f"journal {self.path} cannot be written: {failure}") from failure
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self.db.execute(of_both(query, self.scrubber.moving))
        except sqlite3.OperationalError as failure:
            raise JournalFailed(f"journal {self.path} cannot be read: {failure}") from failure
        except sqlite3.DatabaseError as failure:
            raise JournalDamaged(str(failure)) from failure

    def table(self, name: str, columns: str) -> Iterator[tuple[Any, ...] | None]:
        """Around damaged pages, the rest is read: a leaf of the table, or a large value, costs its own rows."""
        tables = [name, name + OLD] if name in self.scrubber.moving else [name]
        last: Any = None
        for key, row in heapq.merge(*(self._around_damage(table, columns) for table in tables), key=itemgetter(0)):
            if row is None or key != last:  # of two rows with the same key, the first is the newer one
                yield row
            if row is not None:
                last = key

    def _around_damage(self, table: str, columns: str) -> Iterator[tuple[Any, tuple[Any, ...] | None]]:
        """Each row with its key. None stands for rows that cannot be read."""
        key = columns.partition(",")[0]
        query = f"SELECT {columns} FROM {table} WHERE {key} >= ? ORDER BY {key}"
        first: Any = "" if table in KEYED_BY_TEXT else 0
        while first is not None:
            try:
                for row in self.db.execute(query, (first,)):
                    if table not in KEYED_BY_TEXT:
                        first = max(first, row[0] + 1)
                    yield row[0], row
                return
            except sqlite3.OperationalError as failure:
                raise JournalFailed(f"journal {self.path} cannot be read: {failure}") from failure
            except sqlite3.DatabaseError:
                yield first, None
            first = None if table in KEYED_BY_TEXT else self._first_readable(query, first)

    def _first_readable(self, query: str, damaged: int) -> int | None:
        """The first key after a damaged one from which a row can be read, or a later one if damage follows closely."""
        distance = 1
        while not self._can_read(query, damaged + distance):
            distance *= 2
            if damaged + distance > MAX_KEY:
                return None
        low, high = damaged + distance // 2, damaged + distance
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._can_read(query, middle) else (middle, high)
        return high

    def _can_read(self, query: str, first: int) -> bool:
        try:
            self.db.execute(f"{query} LIMIT 1", (first,)).fetchone()
        except sqlite3.OperationalError as failure:
            raise JournalFailed(f"journal {self.path} cannot be read: {failure}") from failure
        except sqlite3.DatabaseError:
            return False
        return True

    def free_bytes(self) -> float:
        return free_bytes(self.path)

    def rewrite(self, statements: Iterable[Statement]) -> str:
        fresh = self.path.with_name(self.path.name + ".new")
        for leftover in self.path.parent.glob(f"{fresh.name}*"):
            leftover.unlink()
        try:
            with closing(open_wal(fresh, sync=self._sync)) as db:
                _create_tables(db)
                db.execute("BEGIN")
                for sql, rows in ((PUT_META, self.header.rows()), *statements):
                    db.executemany(sql, rows)
                db.execute("COMMIT")
            self.db.close()
            aside = set_aside_damaged(self.path)
            fresh.rename(self.path)
            self._use(self._open_file())
        except (sqlite3.Error, OSError) as failure:
            raise JournalFailed(f"journal {self.path} cannot be written: {failure}") from failure
        return str(aside)

    async def scrub(self, wait: Wait) -> list[str]:
        try:
            await self.scrubber.run(wait)
            damaged = [file for file in self.path.parent.glob(f"{self.path.name}.*") if _is_left_aside(self.path, file)]
            for file in damaged:
                file.unlink()
        except (sqlite3.Error, OSError) as failure:
            raise JournalFailed(f"journal {self.path} cannot be scrubbed: {failure}") from failure
        return sorted(file.name for file in damaged)

    def close(self) -> None:
        self.db.close()
        self._lock.close()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._open_file()
        except sqlite3.OperationalError as failure:
            raise JournalRefused(f"journal {self.path} cannot be opened: {failure}") from None
        except sqlite3.DatabaseError as failure:
            raise JournalRefused(
                f"journal {self.path} is damaged, and nothing in it can be read ({failure}): put a backup there; steps "
                "wait in the gateways meanwhile. To give up what it held, end the pool, move the file away, and create "
                "the pool again with --new-journals"
            ) from None

    def _take_lock(self) -> BinaryIO:
        """Of a file beside the journal. The kernel releases it when the process ends."""
        path = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_private(path)
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
        read_header(self.path).reopened(self.name, self._wanted)  # a refused journal keeps its log as it is
        wal_frames = count_wal_frames(self.path)
        db = open_wal(self.path, sync=self._sync)
        try:
            recovered_frames = int(db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
            self.torn_frames = max(0, wal_frames - recovered_frames)
            db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            db.text_factory = _as_text
            _create_tables(db)
            self._write_header(db)
            if self._sync:
                sync_path(self.path.parent)
        except BaseException:
            db.close()
            raise
        return db

    def _write_header(self, db: sqlite3.Connection) -> None:
        """From here on, an earlier process cannot commit."""
        db.execute("BEGIN IMMEDIATE")
        newest = max(_read_header(db), self.header, key=attrgetter("epoch"))
        self.header = newest.reopened(self.name, self._wanted)
        db.executemany(PUT_META, self.header.rows())
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


def find_sqlite_journals(folder: str, pool: str) -> dict[str, JournalHeader]:
    """The pool's journals on this machine, by shard. They may be in use."""
    named = re.compile(rf"{re.escape(pool)}(-\d+)?\.sqlite")
    files = [file for file in Path(folder).glob("*.sqlite") if named.fullmatch(file.name) and file.stat().st_size]
    return {file.stem: read_header(file) for file in sorted(files)}


def read_header(path: Path) -> JournalHeader:
    """Of a file that may be in use."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            db.text_factory = _as_text
            return _read_header(db)
    except sqlite3.Error:
        return JournalHeader()  # what is damaged is seen when it is opened


def _read_header(db: sqlite3.Connection) -> JournalHeader:
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
        return JournalHeader()
    return JournalHeader.parse(dict(db.execute(READ_HEADER)))


def _is_left_aside(journal: Path, file: Path) -> bool:
    """A damaged journal, or a new one that a killed process did not finish; with their logs."""
    return file.name.startswith((f"{journal.name}.damaged-", f"{journal.name}.new"))


def _as_text(value: bytes) -> str:
    """A damaged text is another text, and no error of reading."""
    return value.decode(errors="replace")


def _create_tables(db: sqlite3.Connection) -> None:
    """What is deleted is overwritten."""
    db.execute("PRAGMA secure_delete = ON")
    db.executescript(TABLES)
