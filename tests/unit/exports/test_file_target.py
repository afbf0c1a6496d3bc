"""Where an export goes: nothing is written over, and what has its name is whole."""

from pathlib import Path

import pytest
from stepwell.exports.export_files import format_of, open_target

from stepwell.errors import BadRequest
from stepwell.exports.shapes import StepsShape
from tests.unit.exports.stored import stored, turns

KINDS = ["parquet", "jsonl", "dataset"]
GROUP = stored(turns("a"))


def test_the_ending_names_the_format() -> None:
    assert [format_of(path) for path in ("x.parquet", "s3://b/x.jsonl", "out/x")] == KINDS
    with pytest.raises(BadRequest, match="'.csv' names no format"):
        format_of("x.csv")


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_its_name_once_it_is_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "new" / "x"
    with open_target(str(path), kind, StepsShape()) as target:
        target.write([GROUP])
        assert not path.exists()
    assert path.is_dir() == (kind == "dataset")
    assert [file.name for file in path.parent.iterdir()] == ["x"]
    assert target.rows == 1
    assert target.nbytes == sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_leaves_nothing(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ZeroDivisionError), open_target(str(tmp_path / "x"), kind, StepsShape()) as target:
        target.write([GROUP])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_not_written_over(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(BadRequest, match="exists already"), open_target(str(tmp_path / "x"), kind, StepsShape()):
        pass
    assert (tmp_path / "x").read_text() == "mine"


def test_what_a_killed_export_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    left = tmp_path / "x.part" / "data"
    left.mkdir(parents=True)
    (left / "train-00007.parquet").write_text("half")
    with open_target(str(tmp_path / "x"), "dataset", StepsShape()) as target:
        target.write([GROUP])
    assert [file.name for file in (tmp_path / "x" / "data").iterdir()] == ["train-00000.parquet"]


def test_a_large_dataset_has_several_files(tmp_path: Path) -> None:
    with open_target(str(tmp_path / "x"), "dataset", StepsShape(), max_file_bytes=1) as target:
        for _ in range(3):
            target.write([GROUP])
    files = sorted(file.name for file in (tmp_path / "x" / "data").iterdir())
    assert files == [f"train-0000{n}.parquet" for n in range(3)]
    assert target.rows == 3
