import errno
import os
from pathlib import Path

import fsspec
import pytest
from stepwell.common.files import replacing_file, sync_path, temporary_name, writing_under_temporary_name


def test_a_file_gets_its_name_at_the_end(tmp_path: Path) -> None:
    fs, path = fsspec.core.url_to_fs(str(tmp_path / "folder" / "x.jsonl"))
    with writing_under_temporary_name(fs, path) as temporary:
        fs.pipe_file(temporary, b"whole")
        assert not fs.exists(path)
    assert fs.cat_file(path) == b"whole"
    assert fs.ls(str(tmp_path / "folder"), detail=False) == [path]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_failure_leaves_nothing(tmp_path: Path, *, is_folder: bool) -> None:
    fs, path = fsspec.core.url_to_fs(str(tmp_path / "x"))
    with pytest.raises(ZeroDivisionError), writing_under_temporary_name(fs, path) as temporary:
        Path(temporary).mkdir() if is_folder else Path(temporary).write_bytes(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_first(tmp_path: Path) -> None:
    fs, path = fsspec.core.url_to_fs(str(tmp_path / "x"))
    left = Path(temporary_name(path))
    left.mkdir()
    (left / "old").write_bytes(b"half")
    with writing_under_temporary_name(fs, path) as temporary:
        Path(temporary).mkdir()
        (Path(temporary) / "new").write_bytes(b"whole")
    assert [file.name for file in Path(path).iterdir()] == ["new"]


def test_a_folder_in_memory_gets_its_name_at_the_end() -> None:
    fs, path = fsspec.core.url_to_fs("memory://atomic/set/")
    with writing_under_temporary_name(fs, path) as temporary:
        fs.pipe_file(f"{temporary}/data/a", b"whole")
    assert fs.find("/atomic") == ["/atomic/set/data/a"]


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    with replacing_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_without_folders_to_sync_is_used_and_every_other_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()

    def fail(number: int) -> None:
        def failing_sync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", failing_sync)

    fail(errno.EINVAL)
    sync_path(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync_path(file)
    fail(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_path(tmp_path)
