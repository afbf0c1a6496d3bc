"""Removes what deleted rows have left in a journal's SQLite file, while the shard serves.

- With `secure_delete`, SQLite overwrites what it deletes. Copies of rows stay all the same, in pages between which it
  moved them. So all rows move to new tables, and the old ones are dropped.
- A piece is a transaction of some milliseconds. A thread moves the log into the file, so that commits need not.
- It needs the space of a few pieces. Without that, or while another process reads the file, it waits.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from math import inf
from pathlib import Path

from stepwell.pool.shard.journal_store import MOVED, OLD, Statement, Wait, moves

MIB = 2**20
ROOM = 32 * MIB
"""Free bytes for a few pieces, in the file and its log."""
PIECES_PER_CHECKPOINT = 8
MAX_FRAMES = 4_096
"""Frames of the log that a reader of the file may keep there until pieces wait for it."""
IN_USE = "another process reads the journal, a backup for example"
NOT_MOVED = {"meta", "sqlite_sequence"}
INDEXES = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
"""Those that were created by a statement of their own."""


class SqliteScrub:
    def __init__(self, path: Path, db: sqlite3.Connection, writing: Callable[[], AbstractContextManager[None]]) -> None:
        """`writing` is a transaction of the process that has the journal."""
        self.moving = {table for table in MOVED if table + OLD in _tables(db)}
        """Those that have an old table beside them."""
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
