"""Journals of other versions are refused, and not changed."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest
from stepwell.pool.shard.journal_store import SCHEMA_VERSION

from stepwell.errors import JournalRefused
from stepwell.pool.shard.journal import FILTER_FIELDS, GROUP_FIELDS, STEP_FIELDS, TRAJECTORY_FIELDS
from tests.unit.pool.shard.journals import Place, header_of, kill, open_pool, save, spoil

NEWER = f"has schema version 99, and this Stepwell reads up to {SCHEMA_VERSION}; use the newer Stepwell that wrote it"
OLDER = (
    f"is of an older release: it has schema version .*, and this Stepwell reads {SCHEMA_VERSION} alone. To take the "
    "data along, run the pool with the release that wrote it, and `stepwell export --to FILE`; then create the pool "
    "with this release and another --journal, and `stepwell import FILE`"
)
OF_VERSION = "UPDATE meta SET value = ? WHERE key = 'schema_version'"


def set_version(place: Place, version: int) -> None:
    """Without opening it as a shard does."""
    value = b"%d" % version
    if isinstance(place, Path):
        with closing(sqlite3.connect(place)) as db, db:
            db.execute(OF_VERSION, (value,))
        return
    import psycopg

    from stepwell.pool.shard.postgres_journal import PREFIX

    with psycopg.connect(place.url, options=f"-c search_path={PREFIX}{place.shard}") as postgres:
        postgres.execute("UPDATE meta SET value = %s WHERE key = 'schema_version'", (value,))


@pytest.mark.parametrize(("version", "why"), [(99, NEWER), (SCHEMA_VERSION - 1, OLDER), (11, OLDER), (1, OLDER)])
def test_a_journal_of_another_schema_is_refused_untouched(place: Place, version: int, why: str) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    save(pool, journal)
    kill(journal)
    set_version(place, version)
    header, before = header_of(place), place.read_bytes() if isinstance(place, Path) else b""
    with pytest.raises(JournalRefused, match=why):
        open_pool(place)
    assert header_of(place) == header
    assert not before or (isinstance(place, Path) and place.read_bytes() == before)
    set_version(place, SCHEMA_VERSION)
    restored = open_pool(place)[2]
    assert (restored.steps, restored.damaged) == (1, False)


def test_what_a_killed_shard_left_in_the_log_of_a_refused_journal_stays_there(path: Path, tmp_path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p")
    save(pool, journal)
    journal.db.execute(OF_VERSION, (b"12",))
    left = tmp_path / "left.sqlite"
    for suffix in ("", "-wal"):
        shutil.copy(path.with_name(path.name + suffix), left.with_name(left.name + suffix))
    log = left.with_name("left.sqlite-wal")
    before = left.read_bytes(), log.read_bytes()
    with pytest.raises(JournalRefused, match=OLDER):
        open_pool(left)
    assert (left.read_bytes(), log.read_bytes()) == before
    assert before[1]


@pytest.mark.parametrize("damage", [b"{", b""], ids=["another value", "no value"])
def test_a_journal_whose_version_cannot_be_read_is_damaged_and_not_old(place: Place, damage: bytes) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    save(pool, journal)
    spoil(journal, OF_VERSION, damage)
    pool, journal, restored = open_pool(place)
    assert (restored.steps, restored.damaged) == (1, False)
    assert next(journal.store.rows("SELECT value FROM meta WHERE key = 'schema_version'")) == (b"%d" % SCHEMA_VERSION,)


def test_other_fields_need_another_version() -> None:
    """Rows of one version have the same fields in the same order: with these, raise SCHEMA_VERSION."""
    fields = GROUP_FIELDS, TRAJECTORY_FIELDS, STEP_FIELDS, FILTER_FIELDS
    assert (SCHEMA_VERSION, crc32(repr(fields).encode())) == (13, 0x34C959A1)
