"""Trajectories in Parquet files: whole, in order, and never all in memory."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rig.builders import make_step, same_step
from stepwell.errors import BadRequest
from stepwell.pool.client.batch import make_batch
from stepwell.steps.arrow import ROWS, ParquetReader, ParquetWriter
from stepwell.steps.columns import pack
from stepwell.steps.step import Step


def table(*groups: list[Step]) -> pa.Table:
    return make_batch(pack([step for group in groups for step in group]), [len(group) for group in groups]).to_arrow()


def turns(uid: str, count: int, prompt_uid: str = "p") -> list[Step]:
    return [make_step(uid, prompt_uid, step_index=turn, uid=f"{uid}-{turn}") for turn in range(count)]


def test_a_trajectory_comes_whole_however_the_file_is_cut(tmp_path: Path) -> None:
    groups = [turns("long", 2 * ROWS + 3), turns("short", 1) + turns("other", ROWS), turns("last", 5)]
    pq.write_table(table(*groups), tmp_path / "a.parquet", row_group_size=7)
    read = list(ParquetReader(str(tmp_path)).trajectories())
    assert [(stored.steps[0].trajectory_uid, len(stored.steps)) for stored in read] == [
        ("long", 2 * ROWS + 3),
        ("short", 1),
        ("other", ROWS),
        ("last", 5),
    ]
    given = [step for group in groups for step in group]
    assert all(same_step(a, b) for a, b in zip((s for r in read for s in r.steps), given, strict=True))
    assert [len(stored.table) for stored in read] == [len(stored.steps) for stored in read]


def test_a_trajectory_that_came_twice_is_two(tmp_path: Path) -> None:
    pq.write_table(table(turns("t", 2), turns("t", 1)), tmp_path / "a.parquet")
    assert [len(stored.steps) for stored in ParquetReader(str(tmp_path)).trajectories()] == [2, 1]


def most_held(file: Path, trajectories: int) -> int:
    """Bytes, while a file of so many trajectories is read."""
    tokens = np.random.default_rng(0).integers(0, 150_000, (trajectories, 1_000), dtype=np.int32)
    pq.write_table(table([make_step(f"t{n}", "p", prompt_ids=ids) for n, ids in enumerate(tokens)]), file)
    before = pa.total_allocated_bytes()
    held: list[int] = [pa.total_allocated_bytes() - before for _ in ParquetReader(str(file)).trajectories()]
    assert len(held) == trajectories
    return max(held)


def test_reading_takes_no_more_memory_for_a_larger_file(tmp_path: Path) -> None:
    assert most_held(tmp_path / "large.parquet", 10_000) < 1.5 * most_held(tmp_path / "small.parquet", 2_000)


def test_files_come_in_order_and_folders_within_do_not_count(tmp_path: Path) -> None:
    for name in ("b", "a"):
        pq.write_table(table(turns(name, 1)), tmp_path / f"{name}.parquet")
    (tmp_path / "_rewards").mkdir()
    (tmp_path / "_rewards" / "c.parquet").write_text("something else")
    (tmp_path / "d.parquet.part").write_text("half a file")
    store = ParquetReader(f"file://{tmp_path}")
    assert [stored.steps[0].trajectory_uid for stored in store.trajectories()] == ["a", "b"]


def test_what_holds_no_trajectories_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="there is no Parquet file in"):
        list(ParquetReader(str(tmp_path / "nowhere")).trajectories())
    (tmp_path / "a.parquet").write_text("no Parquet at all")
    with pytest.raises(BadRequest, match=r"a\.parquet cannot be read as Parquet"):
        list(ParquetReader(str(tmp_path)).trajectories())
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(BadRequest, match="no stepwell.schema"):
        list(ParquetReader(str(tmp_path)).trajectories())


def test_a_file_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    reader, writer = ParquetReader(str(tmp_path / "new")), ParquetWriter(str(tmp_path / "new"))
    with pytest.raises(ZeroDivisionError), writer.writing("a.parquet") as write:
        write(table(turns("t", 3)))
        raise ZeroDivisionError
    assert not reader.has_files()
    with writer.writing("a.parquet") as write:
        write(table(turns("t", 3)))
        write(table(turns("u", 2)))
    assert [len(stored.steps) for stored in reader.trajectories()] == [3, 2]


def test_what_is_written_goes_out_in_pieces(tmp_path: Path) -> None:
    with ParquetWriter(str(tmp_path), row_group_bytes=1).writing("a.parquet") as write:
        for name in "abc":
            write(table(turns(name, 2)))
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
