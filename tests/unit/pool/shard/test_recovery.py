"""A damaged journal: what is lost is bounded, and reported."""

import logging
from pathlib import Path

import pytest

from stepwell.errors import JournalRefused
from stepwell.pool.api.plan import Limits
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.journal import JournalFailed
from stepwell.pool.shard.recovery import restore_pool
from tests.builders import EasyPool
from tests.unit.pool.shard.journals import Place, give_late, kill, open_pool, save, spoil


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
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    pool, journal, _ = open_pool(place)
    for uid in ("a", "b", "c"):
        pool.rollout(uid, f"p-{uid}")
    journal.commit(pool.state.snapshot(), 77.0)
    spoil(journal, "UPDATE steps SET added = ? WHERE number = ?", bytes(16), 2)
    with caplog.at_level(logging.ERROR):
        pool, journal, restored = open_pool(place)
    assert restored.damaged
    assert "trajectory b could not be read back" in caplog.text
    assert "what could be read is kept, the old one is" in caplog.text
    assert pool.stats().channels["train"].dropped["corrupt"].steps == 1
    kill(journal)
    pool, journal, restored = open_pool(place)
    assert journal.pool_time() == 77.0
    assert not restored.damaged, "what could be read was written to a new journal"
    assert [group[0].trajectory_uid for group in pool.take(2) or []] == ["a", "c"]


def test_a_file_that_is_no_database_is_refused_with_what_to_do_and_not_changed(path: Path) -> None:
    content = b"this is not a database" * 1000
    path.write_bytes(content)
    with pytest.raises(JournalRefused, match="nothing in it can be read.*put a backup there.*move the file away"):
        open_pool(path)
    assert path.read_bytes() == content
    assert sorted(file.name for file in path.parent.iterdir()) == ["pool.sqlite", "pool.sqlite.lock"]


def test_a_journal_whose_first_page_is_lost_is_refused(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p")
    save(pool, journal)
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * 16_284 + content[16_384:])
    with pytest.raises(JournalRefused, match="nothing in it can be read"):
        open_pool(path)
    path.write_bytes(content)
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
def test_a_row_that_cannot_be_read_is_damage_and_does_not_keep_the_shard_from_starting(
    place: Place, table: str
) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("a", "p")
    pool.rollout("b", "q")
    save(pool, journal)
    changes = {
        "meta": "SET value = ? WHERE key = 'snapshot'",
        "groups": "SET info = ? WHERE seq = 1",
        "trajectories": "SET info = ? WHERE number = 1",
    }
    spoil(journal, f"UPDATE {table} {changes[table]}", b"[{")
    pool, journal, restored = open_pool(place)
    assert restored.damaged
    pool.rollout("c", "r")
    save(pool, journal)
    kill(journal)
    pool, _, _ = open_pool(place)
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
    spoil(journal, "UPDATE groups SET info = ?", b"[{")
    _, journal, restored = open_pool(path)
    assert restored.damaged
    assert [reward.value for _, reward in journal.late_rewards()] == [0.25]


def test_an_error_of_reading_that_may_pass_is_no_damage(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p")
    save(pool, journal)
    journal.db.set_progress_handler(lambda: 1, 1)  # every query is interrupted
    with pytest.raises(JournalFailed, match="cannot be read"):
        restore_pool(EasyPool(Limits(), journal), journal)
    kill(journal)
    assert open_pool(path)[2].steps == 1
    assert not list(path.parent.glob("*damaged*"))


def test_a_journal_is_set_aside_only_when_all_that_was_rescued_is_written(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    save(pool, journal)
    with pytest.raises(JournalFailed, match="cannot be written"):
        journal.store.rewrite([("INSERT INTO archived VALUES (?)", [("a",), ("a",)])])
    kill(journal)
    assert open_pool(place)[2].steps == 1
