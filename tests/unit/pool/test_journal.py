"""The journal: what survives, what is reported, what is refused."""

import logging
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from stepwell.core.intake import Registration, Reward
from stepwell.core.lease import Unit
from stepwell.core.limits import Limits
from stepwell.core.scoring import Score
from stepwell.core.step import Exactness
from stepwell.errors import Conflict, JournalRefused
from stepwell.pool.archive import ParquetArchive
from stepwell.pool.journal import SqliteJournal, checksum
from stepwell.pool.late_rewards import late
from stepwell.pool.restoring import Restored, restore
from tests.builders import EasyPool, make_step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.sqlite"


@pytest.fixture(autouse=True)
def _closes() -> Iterator[None]:
    yield
    for journal in opened:
        journal.db.close()
    opened.clear()


opened: list[SqliteJournal] = []


def open_pool(path: Path, limits: Limits | None = None) -> tuple[EasyPool, SqliteJournal, Restored]:
    limits = limits or Limits()
    journal = SqliteJournal(path, closed_kept=limits.closed_kept)
    opened.append(journal)
    pool = EasyPool(limits, journal)
    return pool, journal, restore(pool, journal)


def save(pool: EasyPool, journal: SqliteJournal) -> None:
    journal.commit(pool.books.snapshot())


def kill(journal: SqliteJournal) -> None:
    """The process is gone: nothing is closed in order, what was not committed is lost."""
    journal.db.close()


def rows(journal: SqliteJournal) -> dict[str, int]:
    tables = ("groups", "trajectories", "steps", "leases")
    return {table: journal.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


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
    assert pool.handout.ack(leased[0]) == "done"
    pool.advance(1000)
    assert pool.lease(1) is None


def test_a_torn_tail_is_ignored_and_reported(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("kept", "p")
    save(pool, journal)
    pool.rollout("torn", "q", prompt_ids=range(20_000))
    save(pool, journal)
    wal = path.with_name("pool.sqlite-wal")
    content = bytearray(wal.read_bytes())
    kill_copy = path.with_name("copy.sqlite")
    content[-100:] = bytes(100)
    kill_copy.write_bytes(path.read_bytes())
    kill_copy.with_name("copy.sqlite-wal").write_bytes(content)
    pool, _, restored = open_pool(kill_copy)
    assert restored.torn_frames > 0
    assert (restored.groups, restored.damaged) == (1, False)
    taken = pool.take(1)
    assert taken is not None
    assert taken[0][0].trajectory_uid == "kept"


def test_a_flipped_bit_costs_the_trajectory_it_is_in_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, journal, _ = open_pool(path)
    for uid in ("a", "b", "c"):
        pool.rollout(uid, f"p-{uid}")
    save(pool, journal)
    journal.db.execute("UPDATE steps SET added = zeroblob(length(added)) WHERE number = 2")
    journal.commit_again()
    kill(journal)
    with caplog.at_level(logging.ERROR):
        pool, journal, restored = open_pool(path)
    assert restored.damaged
    assert "trajectory b could not be read back" in caplog.text
    assert path.with_name("pool.sqlite.damaged-0").exists()
    assert pool.stats().channels["train"].dropped["corrupt"].steps == 1
    kill(journal)
    pool, _, restored = open_pool(path)
    assert not restored.damaged, "what could be read was written to a new journal"
    assert [group[0].trajectory_uid for group in pool.take(2) or []] == ["a", "c"]


def test_a_file_that_is_no_database_is_put_aside_and_the_pool_starts_empty(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b"this is not a database" * 1000)
    with caplog.at_level(logging.ERROR):
        pool, journal, _ = open_pool(path)
    assert "is damaged" in caplog.text
    assert path.with_name("pool.sqlite.damaged-0").exists()
    pool.rollout("t", "p")
    save(pool, journal)
    kill(journal)
    assert open_pool(path)[2].groups == 1


def test_a_page_overwritten_in_the_middle_is_survived(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    for n in range(300):
        pool.rollout(f"t{n}", f"p{n}", prompt_ids=range(2000))
    save(pool, journal)
    journal.close()
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 16_384 * 16_384
    content[middle : middle + 16_384] = b"\xff" * 16_384
    path.write_bytes(content)
    pool, journal, restored = open_pool(path)
    assert restored.damaged
    assert 0 < restored.trajectories == restored.steps < 300
    assert pool.stats().channels["train"].dropped["corrupt"].steps == 300 - restored.steps
    assert journal.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_journal_of_a_newer_schema_is_refused_untouched(path: Path) -> None:
    _, journal, _ = open_pool(path)
    journal.db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    journal.close()
    before = path.read_bytes()
    with pytest.raises(JournalRefused, match="has schema version 99, and this Stepwell reads up to 4"):
        open_pool(path)
    assert path.read_bytes() == before


def test_trained_groups_leave_for_parquet_and_a_group_is_in_one_file(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    from stepwell.pool.arrow import batch_from_arrow

    pool, journal, _ = open_pool(path, Limits(history_size=2))
    archive = ParquetArchive(f"file://{tmp_path}/archive", "data_pool", journal)
    for n in range(6):
        pool.rollout(f"t{n}", f"p{n}", prompt_ids=range(n + 1))
    pool.take(6)
    save(pool, journal)
    archive.flush()
    (file,) = (tmp_path / "archive").iterdir()
    batch = batch_from_arrow(pyarrow.parquet.read_table(file))
    assert [step.trajectory_uid for step in batch.steps()] == ["t0", "t1", "t2", "t3"]
    assert [len(step.prompt_ids) for step in batch.steps()] == [1, 2, 3, 4]
    assert rows(journal)["groups"] == 2, "the two that are still history"


def test_a_file_written_before_a_crash_gets_its_name_after_it(path: Path, tmp_path: Path) -> None:
    _, journal, _ = open_pool(path)
    folder = tmp_path / "archive"
    folder.mkdir()
    (folder / "x.parquet.part").write_bytes(b"data")
    journal.note_archived(f"{folder}/x.parquet")
    journal.commit_again()
    kill(journal)
    _, journal, _ = open_pool(path)
    ParquetArchive(str(folder), "data_pool", journal)
    assert [file.name for file in folder.iterdir()] == ["x.parquet"]
    assert journal.archived() == []


def test_how_a_lease_ended_is_known_after_a_restart(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("a", "p")
    pool.rollout("b", "q")
    expired, acked = pool.lease(1, seconds=10), pool.lease(1, seconds=100)
    assert expired is not None
    assert acked is not None
    pool.handout.ack(acked[0])
    pool.advance(50)
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    assert pool.handout.ack(expired[0]) == "expired"
    assert pool.handout.ack(acked[0]) == "done"


@pytest.mark.parametrize("table", ["groups", "trajectories", "meta"])
def test_a_row_that_cannot_be_read_is_damage_and_does_not_keep_the_shard_from_starting(path: Path, table: str) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("a", "p")
    pool.rollout("b", "q")
    save(pool, journal)
    spoil = "value = x'5b7b' WHERE key = 'snapshot'" if table == "meta" else "info = x'5b7b' WHERE rowid = 1"
    journal.db.execute(f"UPDATE {table} SET {spoil}")
    journal.commit_again()
    kill(journal)
    pool, journal, restored = open_pool(path)
    assert restored.damaged
    pool.rollout("c", "r")
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    left = ["a", "b", "c"] if table == "meta" else ["b", "c"]
    assert pool.stats().channels["train"].held.steps == len(left)
    assert [group[0].trajectory_uid for group in pool.take(len(left)) or []] == left


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


def mixed_rollout(pool: EasyPool) -> None:
    """A step for every trainer, one that is marked, and one of a low grade."""
    pool.register(Registration("t", "p"))
    pool.submit(
        [
            make_step(uid="plain"),
            make_step(uid="greedy", started_at=1, untrainable="greedy: temperature is 0"),
            make_step(uid="again", started_at=2, exactness=Exactness.RETOKENIZED),
        ]
    )
    pool.complete("t", "p", 1.0)


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
    pool.handout.ack(leased[0])
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(path)
    stats = pool.stats().channels["train"]
    assert (stats.shipped.steps, stats.held.steps) == (2, 0)
    assert {kind: tally.steps for kind, tally in stats.left_out.items()} == {"greedy": 1}


def test_the_archive_has_what_was_left_out_with_its_mark_and_groups_of_nothing_else(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    from stepwell.pool.arrow import batch_from_arrow

    pool, journal, _ = open_pool(path)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    pool.rollout("side", "q", untrainable="side_call: a title")
    mixed_rollout(pool)
    pool.take(1)
    save(pool, journal)
    archive.flush()
    (file,) = (tmp_path / "archive").iterdir()
    batch = batch_from_arrow(pyarrow.parquet.read_table(file))
    assert batch.group_sizes_G.tolist() == [1, 3]
    assert [(step.untrainable or "").partition(":")[0] for step in batch.steps()] == ["side_call", "", "greedy", ""]
    assert rows(journal) == {"groups": 0, "trajectories": 0, "steps": 0, "leases": 0}


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
    assert pool.handout.ack(leased[0]) == "done"
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
    snapshot = journal.meta("snapshot")
    snapshot["ledgers"] = {name: ledger[:-1] for name, ledger in snapshot["ledgers"].items()}
    for new in ("scored", "late_judgements", "failed_judgements"):
        del snapshot["counters"][new]
    journal.db.execute("UPDATE meta SET value = ? WHERE key = 'snapshot'", (orjson.dumps(snapshot),))
    journal.db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    journal.db.execute("ALTER TABLE leases DROP COLUMN gate")
    journal.db.execute("ALTER TABLE closed DROP COLUMN revision")
    journal.db.execute("DROP TABLE late_rewards")
    journal.commit_again()


def forget_sources(journal: SqliteJournal) -> None:
    """Turn it into what schema version 3 wrote."""
    for seq, info in journal.db.execute("SELECT seq, info FROM groups").fetchall():
        journal.db.execute("UPDATE groups SET info = ? WHERE seq = ?", (orjson.dumps(orjson.loads(info)[:-1]), seq))
    journal.db.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    journal.commit_again()


def test_where_groups_come_from_survives_and_so_do_the_shelves(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    for prompt, size, source in (("a", 2, "maths"), ("b", 3, "games"), ("c", 2, "maths"), ("d", 1, "")):
        assert pool.send_group(prompt, size, source) == ["accepted"] * size
    leased = pool.fill(3, shares={"games": 1.0})
    assert leased is not None
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    assert pool.backlog("train").groups == {"maths": {2: 2}, "": {1: 1}}
    pool.handout.nack(leased[0])
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
    assert pool.backlog("train").groups == {"": {2: 1, 1: 1}}
    assert journal.meta("schema_version") == 4


def test_the_archive_tells_where_groups_came_from(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    pool, journal, _ = open_pool(path)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    pool.send_group("a", 2, "maths")
    pool.rollout("t", "b")
    pool.take(2)
    save(pool, journal)
    archive.flush()
    (file,) = (tmp_path / "archive").iterdir()
    assert pyarrow.parquet.read_table(file)["source"].to_pylist() == ["maths", "maths", ""]


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


def give_late(pool: EasyPool, archive: ParquetArchive, value: float) -> None:
    reward = Reward(trajectory_uid="t", prompt_uid="p", value=value, source="human", notes="on second thoughts")
    assert not pool.intake.reward(reward)
    archive.add_late_reward(late(reward, pool.books.count_late_reward("t"), at=10.0))


def test_rewards_that_come_too_late_are_kept_beside_the_archive_over_a_kill(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    pool, journal, _ = open_pool(path)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    pool.rollout("t", "p", 1.0)
    pool.take(1)
    give_late(pool, archive, 0.25)
    save(pool, journal)
    kill(journal)
    pool, journal, _ = open_pool(path)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    give_late(pool, archive, 0.5)
    archive.flush()
    (file,) = (tmp_path / "archive" / "_rewards").iterdir()
    read = pyarrow.parquet.read_table(file).to_pylist()
    same = {"trajectory_uid": "t", "prompt_uid": "p", "step_index": None, "source": "human", "at": 10.0}
    assert read == [
        {**same, "notes": "on second thoughts", "value": value, "revision": n} for value, n in [(0.25, 2), (0.5, 3)]
    ]
    assert journal.late_rewards() == []
    groups = pyarrow.parquet.read_table(tmp_path / "archive")
    assert groups["reward"].to_pylist() == [1.0], "the rewards' folder is no part of the data"


def test_late_rewards_survive_damage_to_the_journal(path: Path, tmp_path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p", 1.0)
    pool.take(1)
    give_late(pool, ParquetArchive(str(tmp_path / "archive"), "data_pool", journal), 0.25)
    pool.rollout("spoiled", "q")
    save(pool, journal)
    journal.db.execute("UPDATE groups SET info = x'5b7b'")
    journal.commit_again()
    kill(journal)
    _, journal, restored = open_pool(path)
    assert restored.damaged
    assert [reward.value for _, reward in journal.late_rewards()] == [0.25]
