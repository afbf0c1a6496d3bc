"""What leaves a journal for the archive, once, whenever the shard is killed."""

from pathlib import Path

from stepwell.pool.api.plan import Limits
from stepwell.pool.shard.archive import ParquetArchive
from tests.unit.pool.shard.journals import give_late, kill, mixed_rollout, open_pool, rows, save


def test_trained_groups_leave_for_parquet_and_a_group_is_in_one_file(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    from stepwell.pool.client.batch import batch_from_arrow

    pool, journal, _ = open_pool(path, Limits(history_size=2))
    archive = ParquetArchive(f"file://{tmp_path}/archive", "data_pool", journal)
    for n in range(6):
        pool.rollout(f"t{n}", f"p{n}", prompt_ids=range(n + 1))
    pool.take(6)
    save(pool, journal)
    archive.flush()
    (file,) = (tmp_path / "archive").glob("*.parquet")
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
    journal.commit_rows()
    kill(journal)
    _, journal, _ = open_pool(path)
    ParquetArchive(str(folder), "data_pool", journal).flush()
    assert [file.name for file in folder.iterdir()] == ["x.parquet"]
    assert journal.archived() == []


def test_the_archive_has_what_was_left_out_with_its_mark_and_groups_of_nothing_else(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    from stepwell.pool.client.batch import batch_from_arrow

    pool, journal, _ = open_pool(path)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    pool.rollout("side", "q", untrainable="side_call: a title")
    mixed_rollout(pool)
    pool.take(1)
    save(pool, journal)
    archive.flush()
    (file,) = (tmp_path / "archive").glob("*.parquet")
    batch = batch_from_arrow(pyarrow.parquet.read_table(file))
    assert batch.group_sizes_G.tolist() == [1, 3]
    assert [(step.untrainable or "").partition(":")[0] for step in batch.steps()] == ["side_call", "", "greedy", ""]
    assert rows(journal) == {"groups": 0, "trajectories": 0, "steps": 0, "leases": 0}


def test_the_archive_tells_where_groups_came_from(path: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    pool, journal, _ = open_pool(path)
    archive = ParquetArchive(str(tmp_path / "archive"), "data_pool", journal)
    pool.send_group("a", 2, "maths")
    pool.rollout("t", "b")
    pool.take(2)
    save(pool, journal)
    archive.flush()
    (file,) = (tmp_path / "archive").glob("*.parquet")
    assert pyarrow.parquet.read_table(file)["source"].to_pylist() == ["maths", "maths", ""]


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
