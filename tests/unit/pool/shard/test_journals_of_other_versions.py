"""Journals of other versions: older ones are read, newer ones are refused."""

from pathlib import Path

import orjson
import pytest

from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.shard.journal import SCHEMA_VERSION, SEALED, TRAJECTORY_FIELDS, checksum
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from tests.builders import make_step
from tests.unit.pool.shard.journals import Place, kill, meta, open_pool, save, spoil


def test_a_journal_of_a_newer_schema_is_refused_untouched(path: Path) -> None:
    _, journal, _ = open_pool(path)
    journal.db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    journal.close()
    before = path.read_bytes()
    with pytest.raises(JournalRefused, match=f"has schema version 99, and this Stepwell reads up to {SCHEMA_VERSION};"):
        open_pool(path)
    assert path.read_bytes() == before


def test_a_journal_from_before_there_were_untrainable_steps_is_read(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("leased", "p")
    pool.rollout("held", "q")
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    save(pool, journal)
    make_it_old(journal)
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert (restored.steps, restored.damaged) == (2, False)
    assert pool.leasing.ack(leased[0]) == "done"
    pool.leases = 1
    assert [group[0].trajectory_uid for group in pool.take(1) or []] == ["held"]
    assert pool.stats().channels["train"].shipped.steps == 2


def make_it_old(journal: SqliteJournal) -> None:
    """Turn it into what schema version 1 wrote."""
    for number, info, *blobs in journal.db.execute("SELECT number, info, added, logprobs, mask FROM steps").fetchall():
        old = orjson.dumps(orjson.loads(info)[:-1])
        journal.db.execute(
            "UPDATE steps SET info = ?, checksum = ? WHERE number = ?", (old, checksum(old, *blobs), number)
        )
    forget_sources(journal)
    snapshot = meta(journal, "snapshot")
    snapshot["ledgers"] = {name: ledger[:-1] for name, ledger in snapshot["ledgers"].items()}
    for new in ("scored", "late_judgements", "failed_judgements", "unfinished"):
        del snapshot["counters"][new]
    journal.db.execute("UPDATE meta SET value = ? WHERE key = 'snapshot'", (orjson.dumps(snapshot),))
    journal.db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    journal.db.execute("ALTER TABLE leases DROP COLUMN gate")
    journal.db.execute("ALTER TABLE closed DROP COLUMN revision")
    journal.db.execute("DROP TABLE late_rewards")
    journal.commit_rows()


def forget_sources(journal: SqliteJournal) -> None:
    """Turn it into what schema version 3 wrote."""
    forget_curation(journal)
    shorten(journal, "groups", "seq")
    shorten(journal, "trajectories", "number")
    journal.db.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    journal.commit_rows()


def forget_curation(journal: SqliteJournal) -> None:
    """Turn it into what schema version 4 wrote."""
    shorten(journal, "groups", "seq")
    shorten(journal, "trajectories", "number")
    journal.db.execute("DROP TABLE audit")
    journal.db.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")
    journal.commit_rows()


def without_checksum(value: bytes) -> bytes:
    """As version 10 wrote it."""
    return value[9:] if value[:1] == SEALED else value


VALUES = {
    "groups": "info",
    "trajectories": "info",
    "leases": "gate",
    "late_rewards": "info",
    "audit": "info",
    "lineage": "info",
    "tombstones": "info",
    "meta": "value",
}


def forget_checksums(journal: SqliteJournal) -> None:
    """Turn it into what schema version 10 wrote."""
    for table, value in VALUES.items():
        key, *_ = (name for _, name, *_ in journal.db.execute(f"PRAGMA table_info({table})"))
        for row, sealed in journal.db.execute(f"SELECT {key}, {value} FROM {table}").fetchall():
            journal.db.execute(f"UPDATE {table} SET {value} = ? WHERE {key} = ?", (without_checksum(sealed), row))
    for number, *parts in journal.db.execute("SELECT number, info, added, logprobs, mask FROM steps").fetchall():
        journal.db.execute("UPDATE steps SET checksum = ? WHERE number = ?", (checksum(*parts), number))
    journal.db.execute("DROP INDEX steps_by_trajectory")
    journal.db.execute("ALTER TABLE steps DROP COLUMN state_checksum")
    journal.db.execute("DROP TABLE acknowledged")
    journal.db.execute("UPDATE meta SET value = '10' WHERE key = 'schema_version'")


def shorten(journal: SqliteJournal, table: str, key: str) -> None:
    """Take away the field that was added last."""
    for number, info in journal.db.execute(f"SELECT {key}, info FROM {table}").fetchall():
        shorter = orjson.dumps(orjson.loads(without_checksum(info))[:-1])
        journal.db.execute(f"UPDATE {table} SET info = ? WHERE {key} = ?", (shorter, number))


def forget_columns(journal: SqliteJournal, count: int, version: int) -> None:
    """Turn it into what an older schema version wrote, without the last columns of steps."""
    for number, info, added, logprobs, mask in journal.db.execute(
        "SELECT number, info, added, logprobs, mask FROM steps"
    ).fetchall():
        shorter = orjson.dumps(orjson.loads(info)[:-count])
        row = (shorter, checksum(shorter, added, logprobs, mask), number)
        journal.db.execute("UPDATE steps SET info = ?, checksum = ? WHERE number = ?", row)
    journal.db.execute(f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'")
    journal.commit_rows()


@pytest.mark.parametrize(("count", "version", "kept"), [(4, 5, ""), (3, 6, "lora-7")])
def test_a_journal_from_before_steps_named_their_model_or_temperature_is_read(
    path: Path, count: int, version: int, kept: str
) -> None:
    pool, journal, _ = open_pool(path)
    pool.register(Registration("t", "p"))
    pool.submit([make_step(model="lora-7", temperature=0.5, extras={"kept": True})])
    pool.complete("t", "p")
    save(pool, journal)
    forget_columns(journal, count, version)
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert not restored.damaged
    assert meta(journal, "schema_version") == SCHEMA_VERSION
    taken = pool.take(1)
    assert taken is not None
    ((step,),) = taken
    assert (step.model, step.temperature, step.extras) == (kept, None, {"kept": True})


def test_a_journal_from_before_there_were_sources_is_read(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.send_group("a", 2, "maths")
    pool.rollout("t", "b")
    save(pool, journal)
    forget_sources(journal)
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert (restored.steps, restored.damaged) == (3, False)
    assert pool.ready_groups("train").groups == {"": {2: 1, 1: 1}}
    assert meta(journal, "schema_version") == SCHEMA_VERSION


def test_a_journal_from_before_there_was_curation_is_read(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.send_group("a", 2, "maths")
    save(pool, journal)
    forget_curation(journal)
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert (restored.steps, restored.damaged) == (2, False)
    assert pool.curator.audit(10) == []
    assert pool.ready_groups("train").groups == {"maths": {2: 1}}


def test_a_journal_of_a_version_that_held_trajectories_back_is_read(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p")
    save(pool, journal)
    rows = journal.db.execute("SELECT number, info FROM trajectories").fetchall()
    for number, info in rows:
        fields = dict(zip(TRAJECTORY_FIELDS, orjson.loads(without_checksum(info)), strict=True)) | {
            "reward_left_out": True
        }
        row = (orjson.dumps(list(fields.values())), number)
        journal.db.execute("UPDATE trajectories SET info = ? WHERE number = ?", row)
    journal.commit_rows()
    kill(journal)
    pool, _, _ = open_pool(path, Limits(require_reward=True))
    assert pool.take(1) is not None


def test_the_lineage_of_steps_survives_a_restart_and_older_journals_have_none(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.register(Registration("t", "p"))
    pool.submit([make_step("t", "p", uid="a", prompt_made="bridged", lineage={"replied": "x"})])
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    assert [turn.lineage for turn in pool.ingest.turns("t", "p", "x")] == [{"replied": "x"}]
    forget_columns(journal, 2, 8)
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert (restored.steps, restored.damaged) == (1, False)
    assert not pool.ingest.turns("t", "p", "x")


def test_a_journal_from_before_anybody_could_be_forgotten_is_read_and_forgets(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("gone", "p")
    pool.take(1)
    pool.register(Registration("held", "q", metadata={"subject": "alice"}))
    journal.forget_retired()
    save(pool, journal)
    for statement in (
        "ALTER TABLE closed DROP COLUMN subject",
        "DROP TABLE tombstones",
        "DROP TABLE lineage",
        "UPDATE meta SET value = '9' WHERE key = 'schema_version'",
    ):
        journal.store.commit([(statement, [()])])
    kill(journal)
    pool, journal, restored = open_pool(place)
    assert (restored.trajectories, restored.damaged) == (1, False)
    tombstone = pool.state.note_forgotten(pool.state.tombstones.digest("alice"), 1.0)
    assert [*pool.state.forget_held(tombstone)] == [None]
    save(pool, journal)
    kill(journal)
    pool, _, restored = open_pool(place)
    assert (restored.trajectories, list(pool.state.closed)) == (0, ["gone"])
    assert pool.state.tombstones.subjects == {tombstone.subject: tombstone}
    assert pool.state.tombstones.has_name("held")


def test_a_journal_from_before_all_rows_had_checksums_is_read_and_its_damage_is_noticed(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    for uid in ("leased", "held", "damaged"):
        pool.rollout(uid, f"p-{uid}", 1.0)
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    journal.commit(pool.state.snapshot(), 77.0)
    forget_checksums(journal)
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert (restored.steps, restored.damaged) == (3, False)
    assert journal.pool_time() == 77.0
    assert meta(journal, "schema_version") == SCHEMA_VERSION
    assert pool.leasing.ack(leased[0]) == "done"
    save(pool, journal)
    spoil(journal, "UPDATE steps SET added = ? WHERE number = (SELECT max(number) FROM steps)", bytes(16))
    pool, _, restored = open_pool(path)
    assert (restored.damaged, list(pool.state.trajectories)) == (True, ["held"])
    assert pool.stats().channels["train"].dropped["corrupt"].steps == 1


def test_a_journal_from_before_steps_had_marks_is_read_and_takes_marks(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p", finish_reason="cut_short")
    save(pool, journal)
    shorten(journal, "trajectories", "number")
    snapshot = meta(journal, "snapshot")
    del snapshot["counters"]["marked"]
    journal.db.execute("UPDATE meta SET value = ? WHERE key = 'snapshot'", (orjson.dumps(snapshot),))
    journal.db.execute("UPDATE meta SET value = '11' WHERE key = 'schema_version'")
    journal.commit_rows()
    kill(journal)
    pool, _, restored = open_pool(path)
    assert (restored.steps, restored.damaged) == (1, False)
    assert pool.state.trajectories["t"].steps["t-0"].untrainable is None
    pool.ingest.mark_unseen("t", "p", ["t-0"], "unseen")
    assert pool.stats().marked == {"unseen": 1}
    assert pool.take(1, untrainable=True) is None
