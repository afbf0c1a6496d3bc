"""A damaged journal: what is lost is bounded, and reported."""

import logging
from pathlib import Path

import pytest

from stepwell.pool.shard.archive import ParquetArchive
from tests.unit.pool.shard.journals import give_late, kill, open_pool, save


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
    journal.commit_rows()
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


@pytest.mark.parametrize("table", ["groups", "trajectories", "meta"])
def test_a_row_that_cannot_be_read_is_damage_and_does_not_keep_the_shard_from_starting(path: Path, table: str) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("a", "p")
    pool.rollout("b", "q")
    save(pool, journal)
    spoil = "value = x'5b7b' WHERE key = 'snapshot'" if table == "meta" else "info = x'5b7b' WHERE rowid = 1"
    journal.db.execute(f"UPDATE {table} SET {spoil}")
    journal.commit_rows()
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


def test_late_rewards_survive_damage_to_the_journal(path: Path, tmp_path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p", 1.0)
    pool.take(1)
    give_late(pool, ParquetArchive(str(tmp_path / "archive"), "data_pool", journal), 0.25)
    pool.rollout("spoiled", "q")
    save(pool, journal)
    journal.db.execute("UPDATE groups SET info = x'5b7b'")
    journal.commit_rows()
    kill(journal)
    _, journal, restored = open_pool(path)
    assert restored.damaged
    assert [reward.value for _, reward in journal.late_rewards()] == [0.25]
