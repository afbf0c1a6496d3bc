"""What was deleted is in no row and no file of the tables after a scrub, and the shard serves meanwhile."""

import asyncio
from uuid import uuid4

import pytest

pytest.importorskip("psycopg")

import psycopg
from stepwell.pool.shard.journal_store import OLD

from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.postgres_journal import PostgresStore
from tests.unit.pool.shard.journals import opened
from tests.unit.pool.shard.marked_rows import TABLES, MarkedRows, never


@pytest.fixture
def shard() -> str:
    return uuid4().hex


def open_store(url: str, shard: str) -> PostgresStore:
    store = PostgresStore(url, shard)
    opened.append(ShardJournal(store, closed_kept=100))
    return store


def files_of(store: PostgresStore) -> set[str]:
    query = "SELECT pg_relation_filepath(oid) FROM pg_class WHERE relname = ANY(%s) AND relnamespace = %s::regnamespace"
    found = store.db.execute(query, ([*TABLES], f'"{store.schema}"'))
    return {path for (path,) in found}


async def test_rows_that_change_while_they_move_are_kept_and_tables_are_new_afterwards(
    postgres_url: str, shard: str
) -> None:
    store = open_store(postgres_url, shard)
    rows = MarkedRows(store)
    rows.change(60)
    files = files_of(store)
    scrubbing = asyncio.create_task(store.scrub(never))
    changes = 0
    while not scrubbing.done():
        rows.change(1)
        changes += 1
        await asyncio.sleep(0)
    await scrubbing
    assert changes > 5, "the loop is free between pieces"
    rows.check()
    assert files_of(store).isdisjoint(files), "the files with what deleted rows had left are gone"


@pytest.mark.parametrize("pieces", [3, 8, 12])
async def test_a_process_that_ends_while_rows_move_loses_none_and_the_next_goes_on(
    postgres_url: str, shard: str, pieces: int
) -> None:
    store = open_store(postgres_url, shard)
    rows = MarkedRows(store)
    rows.change(60)
    for _, _ in zip(range(pieces), store.scrub_pieces([]), strict=False):
        pass
    live = rows.live
    store.close()
    store = open_store(postgres_url, shard)
    rows = MarkedRows(store)
    rows.live = live
    rows.check()
    rows.remove([min(live)])
    rows.check()
    await store.scrub(never)
    rows.check()
    assert not [name for name in store.tables() if name.endswith(OLD)]


async def test_a_reader_of_the_tables_delays_the_end_and_no_commit(postgres_url: str, shard: str) -> None:
    store = open_store(postgres_url, shard)
    rows = MarkedRows(store)
    rows.change(20)
    reasons: list[str] = []
    with psycopg.connect(postgres_url) as backup:
        for table in TABLES:
            backup.execute(f'SELECT count(*) FROM "{store.schema}".{table}')

        async def wait(why: str) -> None:
            reasons.append(why)
            rows.change(1)
            if len(reasons) == 2:
                backup.rollback()

        await store.scrub(wait)
    assert len(reasons) == 2
    assert "another connection reads" in reasons[0]
    rows.check()
