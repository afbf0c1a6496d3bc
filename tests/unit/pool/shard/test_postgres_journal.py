"""What is special about a journal in PostgreSQL."""

from uuid import uuid4

import pytest

pytest.importorskip("psycopg")

import psycopg
from stepwell.pool.shard.journal_store import READ_EPOCH, JournalFailed

from rig.builders import EasyPool
from rig.gateways import free_port
from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import JournalSync, Limits
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.placement import find_journals
from stepwell.pool.shard.postgres_journal import PostgresStore
from stepwell.pool.shard.recovery import restore_pool
from tests.unit.pool.shard.journals import opened

ADD = "INSERT INTO archived VALUES (?)"


@pytest.fixture
def shard() -> str:
    return uuid4().hex


def open_store(url: str, shard: str, sync: JournalSync = JournalSync.FULL) -> PostgresStore:
    store = PostgresStore(url, shard, sync=sync)
    opened.append(ShardJournal(store, closed_kept=100))
    return store


def archived(store: PostgresStore) -> list[str]:
    return [file for (file,) in store.rows("SELECT file FROM archived ORDER BY file")]


def cut_off(url: str, store: PostgresStore) -> None:
    """The server ends the connection, as when it is killed."""
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (store.db.info.backend_pid,))


def test_a_commit_is_all_or_nothing(postgres_url: str, shard: str) -> None:
    store = open_store(postgres_url, shard)
    with pytest.raises(JournalFailed, match="duplicate key"):
        store.commit([(ADD, [("a",), ("b",)]), (ADD, [("b",)])])
    assert archived(open_store(postgres_url, shard)) == []


def test_after_a_lost_connection_nothing_is_written_any_more(postgres_url: str, shard: str) -> None:
    store = open_store(postgres_url, shard)
    store.commit([(ADD, [("kept",)])])
    cut_off(postgres_url, store)
    for _ in range(2):
        with pytest.raises(JournalFailed, match="cannot be written"):
            store.commit([(ADD, [("lost",)])])
    assert archived(open_store(postgres_url, shard)) == ["kept"]


def test_a_lost_connection_is_no_damage(postgres_url: str, shard: str) -> None:
    store = open_store(postgres_url, shard)
    journal = ShardJournal(store, closed_kept=100)
    pool = EasyPool(Limits(), journal)
    pool.rollout("t", "p")
    journal.commit(pool.state.snapshot())
    cut_off(postgres_url, store)
    with pytest.raises(JournalFailed, match="cannot be read"):
        restore_pool(EasyPool(Limits(), journal), journal)
    journal = ShardJournal(open_store(postgres_url, shard), closed_kept=100)
    assert restore_pool(EasyPool(Limits(), journal), journal).steps == 1


def test_a_commit_of_which_the_server_warns_has_failed(postgres_url: str, shard: str) -> None:
    store = open_store(postgres_url, shard)
    warn = "DO $$ BEGIN RAISE WARNING 'canceling wait for synchronous replication'; END $$"
    with pytest.raises(JournalFailed, match="may not be safe: canceling wait"):
        store.commit([(ADD, [("a",)]), (warn, [()])])


@pytest.mark.parametrize(("sync", "setting"), [(JournalSync.FULL, "on"), (JournalSync.NORMAL, "off")])
def test_sync_says_whether_a_commit_waits_for_the_disk(
    postgres_url: str, shard: str, sync: JournalSync, setting: str
) -> None:
    store = open_store(postgres_url, shard, sync)
    assert list(store.rows("SELECT current_setting('synchronous_commit')")) == [(setting,)]


def test_of_several_servers_the_one_that_takes_writes_is_used(postgres_url: str, shard: str) -> None:
    server = postgres_url.partition("@")[2]
    open_store(f"postgresql://postgres@127.0.0.1:{free_port()},{server}", shard)
    with pytest.raises(JournalRefused, match="cannot be opened.*read-only"):
        open_store(f"{postgres_url}?options=-cdefault_transaction_read_only%3Don", shard)


def test_a_server_that_is_away_is_named_without_its_password(shard: str) -> None:
    port = free_port()
    with pytest.raises(JournalRefused, match=f"journal postgresql://ana@127.0.0.1:{port}/pool schema") as refused:
        PostgresStore(f"postgresql://ana:secret@127.0.0.1:{port}/pool", shard)
    assert "secret" not in str(refused.value)


def test_a_name_that_the_server_would_cut_is_refused(postgres_url: str) -> None:
    with pytest.raises(JournalRefused, match="too long for PostgreSQL; use a shorter --name"):
        PostgresStore(postgres_url, "x" * 60)


def test_shards_of_one_pool_share_a_database_with_others(postgres_url: str, shard: str) -> None:
    for name in (shard, f"{shard}-1", f"{shard}_2", f"{shard}-x"):
        open_store(postgres_url, name).commit([(ADD, [(name,)])])
    assert list(find_journals(postgres_url, shard)) == [shard, f"{shard}-1"]
    assert archived(open_store(postgres_url, f"{shard}-1")) == [f"{shard}-1"]


def test_a_commit_that_is_never_finished_does_not_keep_the_next_process_waiting(postgres_url: str, shard: str) -> None:
    """As of a node that lost its power within a commit: the server hears nothing, not even an end."""
    vanished = PostgresStore(postgres_url, shard, silence=0.2)
    vanished.db.execute("BEGIN")
    vanished.db.execute(f"{READ_EPOCH} FOR SHARE")
    vanished.db.execute("INSERT INTO archived VALUES ('unfinished')")
    store = open_store(postgres_url, shard)
    assert archived(store) == []
    store.commit([(ADD, [("kept",)])])
    vanished.close()
