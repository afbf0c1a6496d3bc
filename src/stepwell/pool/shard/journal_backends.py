"""Where journals can be: one row for each kind, chosen by the URL scheme of `--journal`."""

from pathlib import Path
from typing import Protocol

from stepwell.common.imports import require
from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.journal_store import JournalHeader, JournalIdentity
from stepwell.pool.shard.sqlite_journal import SqliteJournal, find_sqlite_journals


class JournalBackend(Protocol):
    schemes: tuple[str, ...]
    """Of the URLs that name such journals. A path has none."""
    is_local: bool
    """A shard must run on the node that has its journal. Otherwise it can run on any node."""

    def find(self, journal: str, pool: str) -> dict[str, JournalHeader]:
        """The journals of a pool, by shard, as this machine sees them."""

    def open(
        self,
        journal: str,
        shard: str,
        identity: JournalIdentity,
        *,
        closed_kept: int,
        must_exist: bool = False,
        sync: JournalSync = JournalSync.FULL,
    ) -> ShardJournal:
        """JournalRefused if it cannot be used, and what to do."""


class SqliteBackend:
    """A file for each shard, in a folder."""

    schemes: tuple[str, ...] = ("",)
    is_local = True

    def find(self, journal: str, pool: str) -> dict[str, JournalHeader]:
        return find_sqlite_journals(journal, pool)

    def open(
        self,
        journal: str,
        shard: str,
        identity: JournalIdentity,
        *,
        closed_kept: int,
        must_exist: bool = False,
        sync: JournalSync = JournalSync.FULL,
    ) -> ShardJournal:
        path = Path(journal) / f"{shard}.sqlite"
        return SqliteJournal(path, identity, closed_kept=closed_kept, must_exist=must_exist, sync=sync)


class PostgresBackend:
    """A schema for each shard, in a database. psycopg is imported when it is first used."""

    schemes: tuple[str, ...] = ("postgresql", "postgres")
    is_local = False

    def find(self, journal: str, pool: str) -> dict[str, JournalHeader]:
        self._require_driver()
        from stepwell.pool.shard.postgres_journal import find_postgres_journals

        return find_postgres_journals(journal, pool)

    def open(
        self,
        journal: str,
        shard: str,
        identity: JournalIdentity,
        *,
        closed_kept: int,
        must_exist: bool = False,
        sync: JournalSync = JournalSync.FULL,
    ) -> ShardJournal:
        self._require_driver()
        from stepwell.pool.shard.postgres_journal import PostgresStore

        store = PostgresStore(journal, shard, identity, must_exist=must_exist, sync=sync)
        return ShardJournal(store, closed_kept=closed_kept)

    def _require_driver(self) -> None:
        require("psycopg", "postgres", purpose="--journal postgresql://", error=JournalRefused)


JOURNAL_BACKENDS: tuple[JournalBackend, ...] = (SqliteBackend(), PostgresBackend())


def journal_backend(journal: str) -> JournalBackend:
    scheme, separator, _ = journal.partition("://")
    wanted = scheme if separator else ""
    for backend in JOURNAL_BACKENDS:
        if wanted in backend.schemes:
            return backend
    raise JournalRefused(f"--journal takes a folder or a postgresql:// URL, not {wanted}://")


def find_journals(journal: str, pool: str) -> dict[str, JournalHeader]:
    """The journals of a pool, by shard, as this machine sees them."""
    return journal_backend(journal).find(journal, pool)
