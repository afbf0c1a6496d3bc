"""The journal: what survives, what is refused."""

from pathlib import Path

import orjson
import pytest

from stepwell.errors import Conflict, JournalRefused
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.scoring import Score
from stepwell.pool.shard.journal import TRAJECTORY_FIELDS, checksum
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.step import Exactness
from tests.builders import make_step
from tests.unit.pool.shard.journals import kill, meta, mixed_rollout, open_pool, rows, save


def test_what_was_committed_survives_and_what_was_not_does_not(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("kept", "p", 0.5, metadata={"a": [1]}, extras={"b": "c"})
    save(pool, journal)
    pool.rollout("lost", "q")
    kill(journal)
    pool, _, restored = open_pool(path)
    assert (restored.groups, restored.steps, restored.damaged) == (1, 1, False)
    taken = pool.take(1)
    assert taken is not None
    (step,) = taken[0]
    assert (step.trajectory_uid, step.reward, step.metadata, step.extras) == ("kept", 0.5, {"a": [1]}, {"b": "c"})
    assert pool.take(1) is None


def test_the_file_holds_only_what_the_pool_holds(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    for n in range(10):
        pool.rollout(f"t{n}", f"p{n}")
    pool.take(10)
    pool.register(Registration("open", "p"))
    journal.forget_retired()
    save(pool, journal)
    assert rows(journal) == {"groups": 1, "trajectories": 1, "steps": 0, "leases": 0}


def test_a_long_session_is_journaled_as_what_each_turn_adds(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.register(Registration("t", "p"))
    for turn in range(50):
        pool.submit([make_step(uid=str(turn), started_at=turn, prompt_ids=range(100 * turn + 1), response_ids=[7])])
    save(pool, journal)
    added = journal.db.execute("SELECT sum(length(added)) FROM steps").fetchone()[0]
    assert added < 3 * 4 * 5000
    kill(journal)
    pool, _, _ = open_pool(path)
    pool.complete("t", "p")
    taken = pool.take(1)
    assert taken is not None
    assert [step.prompt_ids.tolist() for step in taken[0]] == [list(range(100 * turn + 1)) for turn in range(50)]


def test_a_batch_under_lease_at_the_kill_can_still_be_acknowledged(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p")
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    pool.leases = 1
    assert pool.lease(1) is None
    assert pool.leasing.ack(leased[0]) == "done"
    pool.advance(1000)
    assert pool.lease(1) is None


def test_a_journal_of_a_newer_schema_is_refused_untouched(path: Path) -> None:
    _, journal, _ = open_pool(path)
    journal.db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    journal.close()
    before = path.read_bytes()
    with pytest.raises(JournalRefused, match="has schema version 99, and this Stepwell reads up to 8"):
        open_pool(path)
    assert path.read_bytes() == before


def test_how_a_lease_ended_is_known_after_a_restart(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("a", "p")
    pool.rollout("b", "q")
    expired, acked = pool.lease(1, seconds=10), pool.lease(1, seconds=100)
    assert expired is not None
    assert acked is not None
    pool.leasing.ack(acked[0])
    pool.advance(50)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    assert pool.leasing.ack(expired[0]) == "expired"
    assert pool.leasing.ack(acked[0]) == "done"


def test_what_a_channel_is_consumed_by_is_known_after_a_restart(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.register(Registration("t", "p"))
    pool.submit([make_step(uid="a")])
    pool.take(1, unit=Unit.STEPS)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    pool.complete("t", "p")
    assert pool.stats().channels["train"].groups == 0, "all its steps were taken, so it is done"
    with pytest.raises(Conflict, match="consumed by steps, not by groups"):
        pool.take(1)


def test_marks_and_grades_survive(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    mixed_rollout(pool)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    taken = pool.take(1, untrainable=True, min_exactness=Exactness.RETOKENIZED)
    assert taken is not None
    assert [(step.uid, step.untrainable, step.exactness.value) for step in taken[0]] == [
        ("plain", None, "submitted"),
        ("greedy", "greedy: temperature is 0", "submitted"),
        ("again", None, "retokenized"),
    ]


def test_what_a_lease_let_through_is_known_after_a_restart_and_so_is_what_was_left_out(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    mixed_rollout(pool)
    leased = pool.lease(1, seconds=100, min_exactness=Exactness.RETOKENIZED)
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    pool.leasing.ack(leased[0])
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    stats = pool.stats().channels["train"]
    assert (stats.shipped.steps, stats.held.steps) == (2, 0)
    assert {kind: tally.steps for kind, tally in stats.left_out.items()} == {"greedy": 1}


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
    for new in ("scored", "late_judgements", "failed_judgements"):
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


def shorten(journal: SqliteJournal, table: str, key: str) -> None:
    """Take away the field that was added last."""
    for number, info in journal.db.execute(f"SELECT {key}, info FROM {table}").fetchall():
        shorter = orjson.dumps(orjson.loads(info)[:-1])
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


@pytest.mark.parametrize(("count", "version", "kept"), [(2, 5, ""), (1, 6, "lora-7")])
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
    assert meta(journal, "schema_version") == 8
    taken = pool.take(1)
    assert taken is not None
    ((step,),) = taken
    assert (step.model, step.temperature, step.extras) == (kept, None, {"kept": True})


def test_where_groups_come_from_survives_and_so_do_the_shelves(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    for prompt, size, source in (("a", 2, "maths"), ("b", 3, "games"), ("c", 2, "maths"), ("d", 1, "")):
        assert pool.send_group(prompt, size, source) == ["accepted"] * size
    leased = pool.fill(3, shares={"games": 1.0})
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    assert pool.ready_groups("train").groups == {"maths": {2: 2}, "": {1: 1}}
    pool.leasing.nack(leased[0])
    filled = pool.fill(8)
    assert filled is not None
    assert filled[1].sources == ["maths", "games", "maths", ""]
    assert filled[1].attempts == [0, 1, 0, 0]


def test_what_was_cleared_stays_cleared(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.send_group("a", 2, "maths")
    pool.clear("train")
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    assert pool.stats().channels["train"].dropped["cleared"].steps == 2
    assert rows(journal) == {"groups": 0, "trajectories": 0, "steps": 0, "leases": 0}
    assert pool.send_group("a", 2, "maths") == ["late"] * 2


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
    assert meta(journal, "schema_version") == 8


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


def test_what_was_unscored_at_the_kill_is_offered_again_and_judgements_from_before_it_do_not_count(path: Path) -> None:
    limits = Limits(require_reward=True)
    pool, journal, _ = open_pool(path, limits)
    for uid in ("scored", "taken", "waiting"):
        pool.rollout(uid, uid, None)
    pool.take_unscored(2)
    assert pool.judge("scored", "scored", Score(0.5, notes="good"))
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path, limits)
    assert pool.stats().scoring.scored == 1
    assert not pool.judge("taken", "taken", 1.0)
    assert [steps[0].trajectory_uid for steps in pool.take_unscored()] == ["taken", "waiting"]
    ((step,),) = pool.take(1) or [[]]
    assert (step.reward, step.metadata["reward"]) == (0.5, {"notes": "good"})


def test_a_journal_of_a_version_that_held_trajectories_back_is_read(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p")
    save(pool, journal)
    rows = journal.db.execute("SELECT number, info FROM trajectories").fetchall()
    for number, info in rows:
        fields = dict(zip(TRAJECTORY_FIELDS, orjson.loads(info), strict=True)) | {"reward_left_out": True}
        row = (orjson.dumps(list(fields.values())), number)
        journal.db.execute("UPDATE trajectories SET info = ? WHERE number = ?", row)
    journal.commit_rows()
    kill(journal)
    pool, _, _ = open_pool(path, Limits(require_reward=True))
    assert pool.take(1) is not None
