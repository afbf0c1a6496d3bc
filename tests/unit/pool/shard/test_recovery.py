"""A damaged journal: what is lost is bounded, and reported."""

import logging
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from stepwell.common.files import PAGE_SIZE
from stepwell.pool.shard.journal_store import JournalFailed

from rig.builders import EasyPool, make_step
from stepwell.errors import JournalRefused
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.recovery import restore_pool
from tests.unit.pool.shard.journals import Place, give_late, kill, open_journal, open_pool, opened, save, spoil

TABLE_LEAF = 13
"""The first byte of a page with rows."""


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


def open_and_done(pool: EasyPool, count: int) -> None:
    """So many open rollouts of three steps, as many complete ones of one step, and one more."""
    for n in range(count):
        pool.register(Registration(f"open{n}", f"q{n}"))
        steps = [make_step(f"open{n}", f"q{n}", uid=f"o{n}-{i}", prompt_ids=list(range(1, 5 + i))) for i in range(3)]
        assert pool.submit(steps) == [SubmitVerdict.ACCEPTED] * 3
        pool.rollout(f"done{n}", f"p{n}")
    pool.rollout("victim", "v")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("added = zeroblob(16)", id="tokens"),
        pytest.param("info = substr(info, 1, 9) || 'x' || substr(info, 11)", id="fields"),
        pytest.param("reward = 0.5", id="reward"),
        pytest.param("reward_source = CAST(x'ff' AS TEXT)", id="no text"),
        pytest.param("lease = 'x'", id="lease"),
        pytest.param("checksum = 'x'", id="checksum"),
    ],
)
def test_a_damaged_step_costs_no_other_rollout_open_ones_least(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool, journal, _ = open_pool(path)
    open_and_done(pool, 100)
    save(pool, journal)
    spoil(journal, f"UPDATE steps SET {damage} WHERE number = (SELECT max(number) FROM steps)")
    pool, journal, restored = open_pool(path)
    assert (restored.damaged, restored.steps) == (True, 400)
    assert "trajectory victim could not be read back" in caplog.text
    stats = pool.stats().channels["train"]
    assert (stats.held.steps, stats.dropped["corrupt"].steps) == (400, 1)
    assert pool.submit([make_step("open5", "q5", uid="next")]) == [SubmitVerdict.ACCEPTED]


def damaged_file(path: Path, seed: int) -> int:
    """Flip a byte behind the first page. Returns where."""
    content, choice = bytearray(path.read_bytes()), random.Random(seed)
    where = choice.randrange(PAGE_SIZE, len(content))
    content[where] ^= 1 << choice.randrange(8)
    path.write_bytes(content)
    return where


def contents(pool: EasyPool) -> dict[str, list[tuple[object, ...]]]:
    """By trajectory: what a trainer would get of it."""
    return {
        uid: [
            (step.uid, tuple(trajectory.tokens.read(step.branch, step.tokens)), step.reward, trajectory.reward)
            for step in trajectory.steps.values()
        ]
        for uid, trajectory in pool.state.trajectories.items()
    }


@pytest.mark.parametrize("flips", [30, pytest.param(500, marks=pytest.mark.nightly)])
def test_of_a_flipped_byte_anywhere_nothing_wrong_is_read_and_what_is_lost_is_counted(
    tmp_path: Path, flips: int
) -> None:
    pool, journal, _ = open_pool(tmp_path / "whole.sqlite")
    open_and_done(pool, 100)
    before = contents(pool)
    save(pool, journal)
    journal.close()
    lost_steps = []
    for seed in range(flips):
        path = tmp_path / "damaged.sqlite"
        shutil.copy(tmp_path / "whole.sqlite", path)
        where = damaged_file(path, seed)
        pool, journal, restored = open_pool(path)
        after = contents(pool)
        assert all(before[uid] == steps for uid, steps in after.items()), f"byte {where} changes data"
        lost = sum(len(steps) for uid, steps in before.items() if uid not in after)
        held = pool.stats().channels["train"].held.steps
        assert (held, restored.damaged or not lost) == (401 - lost, True), f"byte {where}"
        lost_steps.append(lost)
        journal.close()
    assert sum(lost <= 3 for lost in lost_steps) >= 0.95 * flips
    assert max(lost_steps) < 200, "no byte costs more than its page"


def test_damage_to_the_index_of_steps_costs_nothing(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    open_and_done(pool, 100)
    before = contents(pool)
    save(pool, journal)
    query = "SELECT rootpage FROM sqlite_master WHERE name = 'steps_by_trajectory'"
    (number,) = journal.db.execute(query).fetchone()
    journal.close()
    content = bytearray(path.read_bytes())
    content[(number - 1) * PAGE_SIZE] ^= 1
    path.write_bytes(content)
    pool, journal, restored = open_pool(path)
    assert (restored.damaged, contents(pool)) == (True, before)
    assert journal.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_damaged_pages_cost_their_own_rows(path: Path) -> None:
    pool, journal, _ = open_pool(path)
    for n in range(300):
        pool.rollout(f"t{n}", f"p{n}", prompt_ids=range(2000))
    save(pool, journal)
    journal.close()
    content = bytearray(path.read_bytes())
    pages = [page for page in range(PAGE_SIZE, len(content), PAGE_SIZE) if content[page] == TABLE_LEAF]
    tokens = np.arange(2000, dtype=np.int32).tobytes()
    of_steps = [page for page in pages if content.count(tokens, page, page + PAGE_SIZE)]
    for page in (of_steps[len(of_steps) // 3], of_steps[2 * len(of_steps) // 3]):
        content[page : page + PAGE_SIZE] = b"\xff" * PAGE_SIZE
    path.write_bytes(content)
    pool, _, restored = open_pool(path)
    assert restored.damaged
    assert 290 <= restored.steps < 300
    assert pool.stats().channels["train"].dropped["corrupt"].steps == 300 - restored.steps


def test_a_reward_of_minus_zero_is_no_damage(place: Place) -> None:
    """SQLite reads it as 0.0."""
    pool, journal, _ = open_pool(place)
    pool.register(Registration("t", "p"))
    pool.submit([make_step("t", "p", reward=-0.0)])
    save(pool, journal)
    kill(journal)
    pool, _, restored = open_pool(place)
    assert (restored.steps, restored.damaged) == (1, False)
    assert [step.reward for step in pool.state.trajectories["t"].steps.values()] == [0.0]


def test_a_lost_lease_has_expired_for_its_holder_and_its_data_returns(place: Place) -> None:
    pool, journal, _ = open_pool(place)
    pool.rollout("t", "p")
    leased = pool.lease(1, seconds=100)
    assert leased is not None
    save(pool, journal)
    spoil(journal, "UPDATE leases SET expires_at = 5.0")
    pool, journal, restored = open_pool(place)
    assert restored.damaged
    assert pool.leasing.ack(leased[0]) is Settlement.EXPIRED
    assert pool.take(1) is not None


def test_what_waits_for_the_archive_survives_damage_and_an_unreadable_late_reward_keeps_no_shard_from_starting(
    path: Path, tmp_path: Path
) -> None:
    pool, journal, _ = open_pool(path)
    pool.rollout("t", "p", 1.0)
    pool.take(1)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    give_late(pool, archive, 0.25)
    give_late(pool, archive, 0.5)
    journal.note_archived("written and not named yet")
    save(pool, journal)
    spoil(journal, "UPDATE late_rewards SET info = ? WHERE n = 1", b"#00000000{}")
    restarted = open_journal(path)
    opened.append(restarted)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", restarted)
    assert restore_pool(EasyPool(Limits(), restarted), restarted).damaged
    assert [reward.value for _, reward in restarted.late_rewards()] == [0.5]
    assert restarted.archived() == ["written and not named yet"]


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
