"""What stores of journals have in common: the checksums of rows, the header, and how tables are written again.

- A journal's header says its schema version, whose it is, and how often it was opened.
- To remove what deleted rows have left in its pages, a table is renamed to `X_old`, a new `X` is created, the rows move
  a piece at a time, and the old table is dropped. The shard serves between two pieces.
- Meanwhile a row is in one of the two tables, or in both: then that of `X` is the newer one. What is deleted or updated
  is deleted or updated in both, and queries read both. A process that opens the journal finds it so, and goes on.
"""

import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias, TypedDict
from uuid import uuid4
from zlib import crc32

import orjson

from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync, Layout
from stepwell.steps.step import SCHEMA

HEADER_KEYS = ("schema_version", "epoch", "identity")
SNAPSHOT_KEY = "snapshot"
READ_HEADER = f"SELECT key, value FROM meta WHERE key IN ({', '.join(map(repr, (*HEADER_KEYS, SNAPSHOT_KEY)))})"
READ_EPOCH = "SELECT value FROM meta WHERE key = 'epoch'"
TABLES_OF_ALL = """\
CREATE TABLE {new}meta (key TEXT PRIMARY KEY, value {blob}){by_text};
CREATE TABLE {new}groups (seq {int} PRIMARY KEY, info {blob});
CREATE TABLE {new}trajectories (number {int} PRIMARY KEY, group_seq {int}, info {blob});
CREATE TABLE {new}steps (
    number {int} PRIMARY KEY, trajectory {int}, base {int}, shared {int}, info {blob}, reward {real},
    reward_source TEXT, reward_revision {int}, lease TEXT, shipped {bool}, added {blob}, logprobs {blob}, mask {blob},
    checksum {int}, state_checksum {int}
);
CREATE TABLE {new}leases (uid TEXT PRIMARY KEY, channel TEXT, expires_at {real}, gate {blob}){by_text};
CREATE TABLE {new}ended (n {counted}, uid TEXT, how TEXT);
CREATE TABLE {new}acknowledged (uid TEXT PRIMARY KEY){by_text};
CREATE TABLE {new}closed (n {counted}, uid TEXT, revision {int} DEFAULT 0,
    subject TEXT DEFAULT '');
CREATE TABLE {new}late_rewards (n {counted}, info {blob});
CREATE TABLE {new}slices (n {counted}, slice TEXT, key TEXT, info {blob},
    UNIQUE (slice, key));
CREATE TABLE {new}archived (file TEXT PRIMARY KEY){by_text};
CREATE TABLE {new}lineage (n {counted}, info {blob});
CREATE TABLE {new}tombstones (digest TEXT PRIMARY KEY, info {blob}){by_text};
"""
"""With the types of the store, and what it adds to new tables (`new`) and to those whose key is a text (`by_text`)."""
OLD = "_old"
MOVED = {
    "groups": ("seq", "length(info)"),
    "trajectories": ("number", "length(info)"),
    "steps": (
        "number",
        "length(info) + coalesce(length(added), 0) + coalesce(length(logprobs), 0) + coalesce(length(mask), 0)",
    ),
}
"""The tables that can be large: each with its key and the bytes of a row. The others fit into one piece."""
PIECE_BYTES, PIECE_ROWS = 2**20, 512
"""A piece takes some milliseconds. A larger row is a piece of its own."""


Statement: TypeAlias = tuple[str, Iterable[tuple[Any, ...]]]
"""SQL, and the rows for which it is executed."""
Wait: TypeAlias = Callable[[str], Awaitable[None]]
"""Tells operators why work cannot go on now. Returns when it is to be tried again."""
SCHEMA_VERSION = 7 + SCHEMA
"""A new column of the steps raises it. The number is raised with every other change to a table, to the snapshot or to
the fields in journal.py. A journal of another version is refused."""
SEALED = b"#"
"""Begins a value with a checksum. No JSON begins with it."""
PUT_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalIdentity:
    """Which pool and which of its shards a journal belongs to. A journal of another one is refused."""

    pool: str
    """The name of the pool."""
    pool_uid: str
    """Made when the pool was created. Empty: that of the journal that is found, or a new one."""
    shards: int
    """How many the pool had when the journal was created."""
    index: int

    def complete(self) -> "JournalIdentity":
        return self if self.pool_uid else replace(self, pool_uid=uuid4().hex)

    def why_not(self, found: "JournalIdentity") -> str | None:
        """Why the journal that was found cannot be used, and what to do; None if it can."""
        if found.pool != self.pool:
            return f"belongs to pool {found.pool!r}, not to {self.pool!r}: use another --journal, or that --name"
        if self.pool_uid and found.pool_uid != self.pool_uid:
            return (
                f"belongs to another pool of the name {self.pool!r}, created at another time: put the right journal "
                "there, or use another --journal or --name"
            )
        if found.index != self.index:
            return f"is that of shard {found.index}, not of shard {self.index}: its file was renamed; name it as before"
        return None


def missing(name: str, restore: str) -> str:
    """`restore` says how the journal comes back."""
    return (
        f"journal {name} is missing or empty, and the shard had one: {restore}; steps wait in the gateways meanwhile. "
        "To give up what it held, end the pool and create it again with --new-journals"
    )


@dataclass(frozen=True, slots=True)
class JournalHeader:
    schema_version: int = 0
    """0 if none can be read: the journal is new, or its header is damaged. Damage is noticed row by row."""
    epoch: int = 0
    """Raised by every opening. A process with an older one cannot commit."""
    identity: JournalIdentity | None = None
    """None if it cannot be read, or nobody has said whose journal it is."""
    layouts: tuple[Layout, ...] = ()
    """By which the pool has shards, as far as this shard knows; none if it has not written them yet."""

    @classmethod
    def parse(cls, values: Mapping[str, bytes | str]) -> "JournalHeader":
        """The header in the rows of READ_HEADER; those that are missing take their defaults."""
        found: dict[str, Any] = {}
        for key in values.keys() - {SNAPSHOT_KEY}:
            with suppress(orjson.JSONDecodeError):  # a damaged value is as one that is missing
                found[key] = orjson.loads(values[key])
        if SNAPSHOT_KEY in values:
            found["layouts"] = _layouts(values[SNAPSHOT_KEY])
        if found.get("identity") is not None:
            found["identity"] = JournalIdentity(**found["identity"])
        return cls(**found)

    def reopened(self, name: str, identity: JournalIdentity | None) -> "JournalHeader":
        """What the process that opens the journal writes. JournalRefused if it is not its journal, or another release
        wrote it."""
        if self.schema_version > SCHEMA_VERSION:
            raise JournalRefused(
                f"journal {name} has schema version {self.schema_version}, and this Stepwell reads up to "
                f"{SCHEMA_VERSION}; use the newer Stepwell that wrote it, or another --journal"
            )
        if 0 < self.schema_version < SCHEMA_VERSION:
            raise JournalRefused(
                f"journal {name} is of an older release: it has schema version {self.schema_version}, and this "
                f"Stepwell reads {SCHEMA_VERSION} alone. To take the data along, run the pool with the release that "
                "wrote it, and `stepwell export --to FILE`; then create the pool with this release and another "
                "--journal, and `stepwell import FILE`"
            )
        if identity is not None and self.identity is not None:
            why_not = identity.why_not(self.identity)
            if why_not is not None:
                raise JournalRefused(f"journal {name} {why_not}")
        kept = self.identity or (identity and identity.complete())
        return JournalHeader(SCHEMA_VERSION, self.epoch + 1, kept)

    def rows(self) -> list[tuple[str, bytes]]:
        """For PUT_META."""
        values = (self.schema_version, self.epoch, self.identity and asdict(self.identity))
        return [(key, orjson.dumps(value)) for key, value in zip(HEADER_KEYS, values, strict=True) if value is not None]


def _layouts(snapshot: bytes | str) -> tuple[Layout, ...]:
    try:
        fields = unseal(snapshot if isinstance(snapshot, bytes) else snapshot.encode(), SNAPSHOT_KEY)
        return tuple(Layout(*layout) for layout in fields.get("layouts", ()))  # another release may have none
    except ValueError:
        return ()  # damage is noticed when the journal is read


def mirrored(statements: Iterable[Statement], moving: Collection[str]) -> Iterator[Statement]:
    """The statements, and those that change the old tables too."""
    for sql, rows in statements:
        table = next((name for name in moving if sql.startswith((f"DELETE FROM {name} ", f"UPDATE {name} "))), None)
        if table is None:
            yield sql, rows
            continue
        kept = list(rows)
        yield sql, kept
        yield sql.replace(table, table + OLD, 1), kept


def of_both(query: str, moving: Collection[str]) -> str:
    """The query, of old rows too."""
    for table in moving:
        key, _ = MOVED[table]
        older = f"SELECT * FROM {table}{OLD} WHERE {key} NOT IN (SELECT {key} FROM {table})"
        query = re.sub(rf"FROM {table}\b", f"FROM (SELECT * FROM {table} UNION ALL {older}) AS {table}", query)
    return query


def moves(table: str, read: Callable[[str], Iterable[tuple[Any, ...]]]) -> Iterator[list[Statement]]:
    """What moves the next rows of an old table. The last ones have moved when it ends."""
    key, nbytes = MOVED[table]
    after = -1
    while found := list(
        read(f"SELECT {key}, {nbytes} FROM {table}{OLD} WHERE {key} > {after} ORDER BY {key} LIMIT {PIECE_ROWS}")
    ):
        size = 0
        for number, row_bytes in found:
            if size and size + row_bytes > PIECE_BYTES:
                break
            after, size = number, size + row_bytes
        moved = f"INSERT INTO {table} SELECT * FROM {table}{OLD} WHERE {key} <= ? ON CONFLICT DO NOTHING"
        yield [(moved, [(after,)]), (f"DELETE FROM {table}{OLD} WHERE {key} <= ?", [(after,)])]


class JournalFailed(Exception):
    """A commit failed, for example because the disk is full: the state in memory is ahead of the journal. Or the store
    went away while it was read."""


class JournalDamaged(Exception):
    """Some rows cannot be read."""


class StoreOptions(TypedDict, total=False):
    """How a store is opened."""

    must_exist: bool
    """JournalRefused if it is not there."""
    sync: JournalSync


class JournalStore(Protocol):
    """Where the rows are. There is one writer; one that another process has replaced can commit no more."""

    name: str
    """For messages: the path of a file, for example."""
    torn_frames: int
    """Frames at the end of the log that belong to no committed transaction. Nothing in them was acknowledged."""

    written_at: float | None
    """Wall-clock time of the last change before it was opened; None if it was empty."""

    def commit(self, statements: Iterable[Statement]) -> None:
        """All or nothing. JournalFailed if that is not certain: then nothing more may be written."""

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """JournalDamaged if they cannot be read, or not all of them; JournalFailed if that may be different later."""

    def table(self, name: str, columns: str) -> Iterator[tuple[Any, ...] | None]:
        """Its rows in the order of its key, which is the first column. None stands for rows that cannot be read."""

    def free_bytes(self) -> float:
        """How much more can be written; infinite if that is not known."""

    def rewrite(self, statements: Iterable[Statement]) -> str:
        """Set what is damaged aside and write these rows to a new store, all or nothing. Returns the name of the old
        one."""

    async def scrub(self, wait: Wait) -> list[str]:
        """Remove what deleted rows have left in files, and what was set aside as damaged. Returns the names of that.
        Commits go on meanwhile. JournalFailed if it is not certain; it may be tried again."""

    def close(self) -> None: ...


def checksum(*parts: bytes | memoryview | None, keys: tuple[Any, ...] = ()) -> int:
    """Detects a flipped bit in a row, which SQLite does not."""
    value = crc32(repr(keys).encode()) if keys else 0
    for part in parts:
        if part is not None:
            value = crc32(part, value)
    return value


def seal(value: object, *keys: object) -> bytes:
    """JSON, and before it a checksum of it and of the other columns of its row."""
    text = dump_json(value)
    return b"%c%08x%s" % (SEALED, checksum(text, keys=keys), text)


def unseal(sealed: bytes, *keys: object) -> Any:
    """What `seal` wrote. ValueError if it is something else."""
    if not isinstance(sealed, bytes):
        raise ValueError(f"{type(sealed).__name__} in place of a value")
    if sealed[:9] != b"%c%08x" % (SEALED, checksum(sealed[9:], keys=keys)):
        raise ValueError(f"its checksum is wrong: {sealed[:100]!r}")
    return load_json(sealed[9:])


def dump_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=tuple)  # a record of a few fields
    except TypeError:  # an integer beyond 64 bits, say
        return json.dumps(value).encode()


def load_json(value: bytes) -> Any:
    """What `dump_json` wrote. ValueError if it is something else."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:  # half of a surrogate pair, say
        return json.loads(value)
