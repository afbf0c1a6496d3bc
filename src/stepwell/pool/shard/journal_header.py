"""What a journal says about itself: its schema version, whose it is, and how often it was opened."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

import orjson

from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import Layout
from stepwell.pool.shard.journal_store import SCHEMA_VERSION, unseal


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


HEADER_KEYS = ("schema_version", "epoch", "identity")
SNAPSHOT_KEY = "snapshot"
READ_HEADER = f"SELECT key, value FROM meta WHERE key IN ({', '.join(map(repr, (*HEADER_KEYS, SNAPSHOT_KEY)))})"
READ_EPOCH = "SELECT value FROM meta WHERE key = 'epoch'"


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
        """Of the rows of READ_HEADER; those that are missing take their defaults."""
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
