"""The journal of a shard as a SQLite file on the disk of its node.

- A commit is one transaction of the write-ahead log. With `sync=full` it returns when the disk has it.
- One process has the file open. It holds a lock, and it raised the file's epoch when it opened it: a commit under an
  older epoch fails.
- With `secure_delete`, SQLite overwrites what it deletes. Copies of rows stay all the same, in pages between which it
  moved them. So a scrub moves all rows to new tables, in transactions of some milliseconds, while the shard serves. A
  thread moves the log into the file, so that commits need not. The space of a few pieces is needed: without that, or
  while another process reads the file, it waits.
"""

import asyncio
import fcntl
import heapq
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from math import inf
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Unpack

from stepwell.common.files import count_wal_frames, create_private, open_wal, set_aside_damaged, sync_path
from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.journal_store import (
    MOVED,
    OLD,
    PUT_META,
    READ_EPOCH,
    READ_HEADER,
    TABLES_OF_ALL,
    JournalDamaged,
    JournalFailed,
    JournalHeader,
    JournalIdentity,
    Statement,
    StoreOptions,
    Wait,
    mirrored,
    missing,
    moves,
    of_both,
)

TABLES = TABLES_OF_ALL.format(
    new="IF NOT EXISTS ",
    int="INTEGER",
    real="REAL",
    blob="BLOB",
    bool="INTEGER",
    counted="INTEGER PRIMARY KEY AUTOINCREMENT",
    by_text=" WITHOUT ROWID",
)
INDEX = "CREATE INDEX IF NOT EXISTS steps_by_trajectory ON steps (trajectory);\n"
"""The index tells how many steps each trajectory has: so it is known after damage which trajectories lack some."""
KEYED_BY_TEXT = ("leases", "acknowledged", "archived", "tombstones")
MAX_KEY = 2**63 - 1
CHECKPOINT_PAGES = 4_096

MIB = 2**20
ROOM = 32 * MIB
"""Free bytes for a few pieces, in the file and its log."""
PIECES_PER_CHECKPOINT = 8
MAX_FRAMES = 4_096
"""Frames of the log that a reader of the file may keep there until pieces wait for it."""
IN_USE = "another process reads the journal, a backup for example"
NOT_MOVED = {"meta", "sqlite_sequence"}
INDEXES = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
"""Selects the indexes of a table that were created by a statement of their own."""


class SqliteScrub:
    def __init__(self, path: Path, db: sqlite3.Connection, writing: Callable[[], AbstractContextManager[None]]) -> None:
        """`writing` is a transaction of the process that has the journal."""
        self.moving = {table for table in MOVED if table + OLD in _tables(db)}
        """Tables that still have an old table beside them, whose rows are being moved."""
        self._path = path
        self._db = db
        self._writing = writing

    async def run(self, wait: Wait) -> None:
        with closing(sqlite3.connect(self._path, timeout=0.0, check_same_thread=False)) as beside:
            await _checkpoint(beside, wait)
            work, count = self.pieces(), 0
            while True:
                while free_bytes(self._path) < ROOM:
                    await wait(f"the disk of {self._path} has less than {ROOM / MIB:g} MiB free")
                began = time.monotonic()
                if next(work, work) is work:
                    break
                count += 1
                await asyncio.to_thread(_sync, self._path.with_name(f"{self._path.name}-wal"))
                if count % PIECES_PER_CHECKPOINT == 0:
                    await _checkpoint(beside, wait)
                await asyncio.sleep(time.monotonic() - began)  # half of the time is left for calls
            await _checkpoint(beside, wait)
        while not self._empty_log():
            await wait(IN_USE)

    def _finish_moves(self) -> Iterator[None]:
        for table in sorted(self.moving):
            for piece in moves(table, self._db.execute):
                self._write(piece)
                yield
            self._write([(f"DROP TABLE {table}{OLD}", ())])
            self.moving.remove(table)
            yield

    def pieces(self) -> Iterator[None]:
        """Each `next` is one piece."""
        yield from self._finish_moves()
        for table in sorted(_tables(self._db) - NOT_MOVED):
            (create,) = self._db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
            indexes = self._db.execute(INDEXES, (table,)).fetchall()
            begin = [(f"DROP INDEX {name}", ()) for name, _ in indexes]
            begin += [(f"ALTER TABLE {table} RENAME TO {table}{OLD}", ()), (create, ())]
            begin += [(create_index, ()) for _, create_index in indexes]
            if table in MOVED:
                self._write(begin)
                self.moving.add(table)
                yield from self._finish_moves()
            else:
                number = f"SELECT '{table}', seq FROM sqlite_sequence WHERE name = '{table}{OLD}'"
                rows = f"INSERT INTO {table} SELECT * FROM {table}{OLD}"
                count = f"INSERT INTO sqlite_sequence (name, seq) {number}"  # no row number is given again
                self._write([*begin, (count, ()), (rows, ()), (f"DROP TABLE {table}{OLD}", ())])
                yield

    def _write(self, statements: Iterable[Statement]) -> None:
        """A statement without rows is executed once. The loop does not wait for the disk: the next commit of a call, or
        the thread, brings the log there, in order."""
        sync = self._read("PRAGMA synchronous")
        self._db.execute("PRAGMA synchronous = NORMAL")
        try:
            with self._writing():
                for sql, rows in statements:
                    if rows == ():
                        self._db.execute(sql)
                    else:
                        self._db.executemany(sql, rows)
        finally:
            self._db.execute(f"PRAGMA synchronous = {sync}")

    def _read(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def _empty_log(self) -> bool:
        """False if another process reads the file. The thread has left it little to do."""
        try:
            self._db.execute("PRAGMA busy_timeout = 0")
            return not self._read("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._db.execute("PRAGMA busy_timeout = 5000")


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
        """The header as this process wrote it."""
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
        """The lock of a file beside the journal. The kernel releases it when the process ends."""
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
        self, path: Path, identity: JournalIdentity | None = None, *, closed_kept: int, **options: Unpack[StoreOptions]
    ) -> None:
        self.file = SqliteStore(path, identity, **options)
        super().__init__(self.file, closed_kept=closed_kept)

    @property
    def db(self) -> sqlite3.Connection:
        return self.file.db


def _is_left_aside(journal: Path, file: Path) -> bool:
    """A damaged journal, or a new one that a killed process did not finish; with their logs."""
    return file.name.startswith((f"{journal.name}.damaged-", f"{journal.name}.new"))


def _as_text(value: bytes) -> str:
    """A damaged text is another text, and no error of reading."""
    return value.decode(errors="replace")


def _create_tables(db: sqlite3.Connection) -> None:
    """What is deleted is overwritten."""
    db.execute("PRAGMA secure_delete = ON")
    db.executescript(TABLES + INDEX)


def free_bytes(path: Path) -> float:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return inf
    return disk.f_bavail * disk.f_frsize


def _sync(log: Path) -> None:
    """SQLite has no lock on its log that a close of the file could release."""
    with log.open("rb") as file:
        os.fdatasync(file.fileno())


async def _checkpoint(db: sqlite3.Connection, wait: Wait) -> None:
    """In a thread, beside commits."""
    while True:
        _, frames, moved = await asyncio.to_thread(_log_frames, db)
        if frames - moved < MAX_FRAMES:
            return
        await wait(IN_USE)


def _log_frames(db: sqlite3.Connection) -> tuple[int, int, int]:
    """Move what can be moved into the file. Returns whether that was not possible, all frames, and those that are
    moved."""
    found: tuple[int, int, int] = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return found


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def read_header(path: Path) -> JournalHeader:
    """The header of a file that may be in use."""
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


def _written_at(path: Path) -> float | None:
    files = [file for file in (path, path.with_name(path.name + "-wal")) if file.exists() and file.stat().st_size]
    return max((file.stat().st_mtime for file in files), default=None)
