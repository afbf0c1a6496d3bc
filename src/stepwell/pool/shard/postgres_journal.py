"""The journal of a shard in a PostgreSQL database: a schema of its own, reached from any node.

- A commit is one transaction. With `sync=full` it returns when the server has it on disk, and also its synchronous
  replicas, if the server has such.
- One process writes: it raised the epoch when it opened the journal, and a commit under an older epoch fails. A commit
  locks the epoch, so a process that opens the journal waits for it.
- After a lost connection it is not known what was committed. Nothing is tried again here: the shard's process ends, and
  the next one reads what the database has.
- The connection string may name several hosts: the one that takes writes is used.
"""

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8BinaryDumper

from stepwell.common.http import hide_password
from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync
from stepwell.pool.shard.journal_store import (
    MOVED,
    OLD,
    PUT_META,
    READ_EPOCH,
    READ_HEADER,
    TABLES_OF_ALL,
    JournalFailed,
    JournalHeader,
    JournalIdentity,
    Statement,
    Wait,
    mirrored,
    missing,
    moves,
    of_both,
)

PREFIX = "stepwell_"
"""The schema of a shard has this and the name of the shard."""
MAX_NAME = 63
"""Bytes of an identifier. PostgreSQL cuts longer ones."""
ROWS_AT_ONCE = 200
"""Rows that are read with one message: a step can have megabytes."""
TABLES = TABLES_OF_ALL.format(
    new="",
    int="BIGINT",
    real="DOUBLE PRECISION",
    blob="BYTEA",
    bool="BOOLEAN",
    counted="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    by_text="",
)
UNCOMPRESSED = "ALTER TABLE steps ALTER added SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL"
"""Tokens are not compressed: that would take longer than writing them."""
CONNECTION: dict[str, Any] = {
    "target_session_attrs": "read-write",
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""Unless the connection string says otherwise. A server that vanished is noticed within 15 s."""
SESSION: dict[str, str] = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "lock_timeout": "20s",
}
"""Settings of the connection at the server. A node that vanishes within a commit must not block its successor."""
PATIENCE = "50ms"
"""For which a scrub waits until it is alone with a table."""
SILENCE = 10.0
"""Seconds after which the server ends a transaction of which it hears nothing more."""
RESTORE = "is --journal the right database? Restore a backup of it otherwise"


class PostgresStore:
    torn_frames = 0
    written_at: float | None = None

    def __init__(
        self,
        url: str,
        shard: str,
        identity: JournalIdentity | None = None,
        *,
        must_exist: bool = False,
        sync: JournalSync = JournalSync.FULL,
        silence: float = SILENCE,
    ) -> None:
        """JournalRefused if it is the journal of another pool or shard, or is not there though it must exist."""
        self.schema = PREFIX + shard
        self.name = f"{hide_password(url)} schema {self.schema}"
        if len(self.schema.encode()) > MAX_NAME:
            raise JournalRefused(f"journal {self.name}: the name is too long for PostgreSQL; use a shorter --name")
        self._wanted = identity
        self._warnings: list[str] = []
        """What the server said since the last commit began."""
        self.header = JournalHeader()
        """The header as this process wrote it."""
        with _refusing(self.name):
            self.db = _connect(url, f"stepwell shard {shard}")
            try:
                self.db.add_notice_handler(self._note)
                self.db.adapters.register_dumper(int, Int8BinaryDumper)  # of one type, whatever the value is
                settings = {
                    "search_path": sql.Identifier(self.schema).as_string(),
                    "synchronous_commit": "on" if sync is JournalSync.FULL else "off",
                    "idle_in_transaction_session_timeout": f"{silence * 1000:.0f}ms",
                }
                for setting in (SESSION | settings).items():
                    self.db.execute("SELECT set_config(%s, %s, false)", setting)
                self._open(must_exist)
            except BaseException:
                self.db.close()
                raise

    def commit(self, statements: Iterable[Statement]) -> None:
        with self._committing(), self.db.pipeline(), self.db.transaction(), self.db.cursor() as cursor:
            self._check_epoch(cursor)
            _execute_all(cursor, mirrored(statements, self._moving))

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        try:
            with self.db.transaction(), self.db.cursor(name="rows") as cursor:
                cursor.itersize = ROWS_AT_ONCE
                for row in cursor.execute(_query(of_both(query, self._moving)), binary=True):
                    yield tuple(map(_as_read, row))
        except psycopg.Error as failure:  # also for damage that the server finds: it is mended there
            raise JournalFailed(f"journal {self.name} cannot be read: {failure}") from failure

    def table(self, name: str, columns: str) -> Iterator[tuple[Any, ...] | None]:
        yield from self.rows(f"SELECT {columns} FROM {name} ORDER BY {columns.partition(',')[0]}")

    def free_bytes(self) -> float:
        return math.inf

    def rewrite(self, statements: Iterable[Statement]) -> str:
        with self._committing(), self.db.transaction(), self.db.cursor() as cursor:
            self._check_epoch(cursor)
            aside = self._name_aside(cursor)
            names = (sql.Identifier(self.schema), sql.Identifier(aside))
            cursor.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(*names))
            self._create_tables(cursor)
            _execute_all(cursor, [(PUT_META, self.header.rows()), *statements])
        self._moving.clear()
        return f"schema {aside}"

    async def scrub(self, wait: Wait) -> list[str]:
        """The tables are written again. The server's own log and its backups are not ours to clean, and the room on its
        disk is not known here."""
        try:
            names = self.db.execute("SELECT nspname FROM pg_namespace").fetchall()
            aside = sorted(name for (name,) in names if self._is_aside(name))
            pieces, began = self.scrub_pieces(aside), time.monotonic()
            for why in pieces:
                await (wait(why) if why else asyncio.sleep(time.monotonic() - began))  # half of the time is for calls
                began = time.monotonic()
        except psycopg.Error as failure:
            raise JournalFailed(f"journal {self.name} cannot be scrubbed: {failure}") from failure
        return aside

    def scrub_pieces(self, aside: Iterable[str]) -> Iterator[str]:
        """Each `next` is one piece, or says why it is not possible now."""
        for name in aside:
            schema = sql.Identifier(name).as_string()
            yield from self._alone(f"DROP SCHEMA {schema} CASCADE")
        yield from self._finish_moves()
        for table in sorted(self.tables()):
            if table not in MOVED:
                yield from self._alone(f"VACUUM (FULL) {table}", is_vacuum=True)
                yield ""
                continue
            create = f"CREATE TABLE {table} (LIKE {table}{OLD} INCLUDING ALL)"
            yield from self._alone(f"ALTER TABLE {table} RENAME TO {table}{OLD}", create)
            self._moving.add(table)
            yield from self._finish_moves()

    def _finish_moves(self) -> Iterator[str]:
        for table in sorted(self._moving):
            for piece in moves(table, self.rows):
                self.commit(piece)
                yield ""
            yield from self._alone(f"DROP TABLE {table}{OLD}")
            self._moving.remove(table)
            yield ""

    def _alone(self, *statements: str, is_vacuum: bool = False) -> Iterator[str]:
        """What needs a table that nobody else reads: each `next` has failed, because calls must not wait for that."""
        while True:
            self.db.execute(f"SET lock_timeout = '{PATIENCE}'")
            try:
                with nullcontext() if is_vacuum else self.db.transaction(), self.db.cursor() as cursor:
                    self._check_epoch(cursor)
                    for statement in statements:
                        cursor.execute(statement)
                return
            except psycopg.errors.LockNotAvailable:
                pass
            finally:
                self.db.execute(f"SET lock_timeout = '{SESSION['lock_timeout']}'")
            yield "another connection reads the journal's tables, a backup for example"

    def tables(self) -> set[str]:
        found = self.db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (self.schema,))
        return {table for (table,) in found}

    def close(self) -> None:
        self.db.close()

    def _open(self, must_exist: bool) -> None:
        """From here on, an earlier process cannot commit."""
        with self.db.transaction():
            self.db.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (self.schema,))
            found = _read_header(self.db, self.schema)
            if found is None and must_exist:
                raise JournalRefused(missing(self.name, RESTORE))
            header = (found or self.header).reopened(self.name, self._wanted)
            cursor = self.db.cursor()
            if found is None:
                self._create_tables(cursor)
            _execute_all(cursor, [(PUT_META, header.rows())])
        self.header = header
        self._moving = {table for table in MOVED if table + OLD in self.tables()}

    def _check_epoch(self, cursor: psycopg.Cursor[Any]) -> None:
        epoch = cursor.execute(f"{READ_EPOCH} FOR SHARE").fetchone()
        if epoch is None or int(epoch[0]) != self.header.epoch:
            raise JournalFailed(f"journal {self.name} was opened by another process")

    def _create_tables(self, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self.schema)))
        for statement in (*TABLES.split(";\n"), UNCOMPRESSED):
            cursor.execute(statement)

    def _is_aside(self, name: str) -> bool:
        return re.fullmatch(r"damaged\d+_(.*)", name) is not None and name.partition("_")[2] == self.schema

    def _name_aside(self, cursor: psycopg.Cursor[Any]) -> str:
        """That no schema has yet."""
        taken = {name for (name,) in cursor.execute("SELECT nspname FROM pg_namespace")}
        candidates = (f"damaged{n}_{self.schema}"[:MAX_NAME] for n in count())
        return next(name for name in candidates if name not in taken)

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self._warnings.clear()
        try:
            yield
        except psycopg.Error as failure:
            raise JournalFailed(f"journal {self.name} cannot be written: {failure}") from failure
        if self._warnings:  # for example, that a wait for replicas was cancelled
            raise JournalFailed(f"journal {self.name} may not be safe: {'; '.join(self._warnings)}")

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._warnings.append(notice.message_primary or "")


def find_postgres_journals(url: str, pool: str) -> dict[str, JournalHeader]:
    """The pool's journals, by shard. They may be in use."""
    named = re.compile(rf"{re.escape(pool)}(-\d+)?")
    with _refusing(hide_password(url)), _connect(url, "stepwell pool") as db:
        schemas = db.execute("SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", (PREFIX,)).fetchall()
        shards = sorted(name.removeprefix(PREFIX) for (name,) in schemas)
        headers = {shard: _read_header(db, PREFIX + shard) for shard in shards if named.fullmatch(shard)}
    return {shard: header for shard, header in headers.items() if header is not None}


def _connect(url: str, application: str) -> psycopg.Connection[tuple[Any, ...]]:
    given = CONNECTION | {"application_name": application} | conninfo_to_dict(url)
    return psycopg.connect(make_conninfo(**given), autocommit=True, prepare_threshold=0)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as failure:
        raise JournalRefused(f"journal {name} cannot be opened: {str(failure).strip()}") from None


def _read_header(db: psycopg.Connection[tuple[Any, ...]], schema: str) -> JournalHeader | None:
    """None if there is no such journal."""
    meta = sql.Identifier(schema, "meta")
    there = db.execute("SELECT to_regclass(%s)", (meta.as_string(db),)).fetchone()
    if there is None or there[0] is None:
        return None
    query = READ_HEADER.replace("FROM meta", f"FROM {meta.as_string(db)}")
    return JournalHeader.parse(dict(db.execute(query).fetchall()))


def _execute_all(cursor: psycopg.Cursor[Any], statements: Iterable[Statement]) -> None:
    for statement, rows in statements:
        cursor.executemany(_query(statement), (tuple(map(_as_written, row)) for row in rows))


def _as_written(value: Any) -> Any:
    """PostgreSQL has no text with a zero byte, and agents choose names."""
    if isinstance(value, str):
        return value.encode("unicode_escape").decode("ascii")
    return value.cast("B") if isinstance(value, memoryview) else value


def _as_read(value: Any) -> Any:
    return value.encode("ascii").decode("unicode_escape") if isinstance(value, str) else value


def _query(statement: str) -> str:
    return statement.replace("?", "%s")
