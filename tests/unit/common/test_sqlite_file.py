import sqlite3
from contextlib import closing
from pathlib import Path
from shutil import disk_usage

import pytest
from stepwell.common.files import count_wal_frames, open_wal, scrub_database, set_aside_damaged

from stepwell.common import files as sqlite_file


def test_a_file_is_opened_in_wal_mode_in_a_folder_that_is_made(tmp_path: Path) -> None:
    db = open_wal(tmp_path / "new" / "file.sqlite")
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()


def test_an_exclusive_file_is_refused_to_others_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    db = open_wal(path, exclusive=True)
    db.execute("CREATE TABLE t (n)")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        open_wal(path, exclusive=True, lock_timeout=0.0)
    db.close()
    open_wal(path, exclusive=True, lock_timeout=0.0).close()


def test_what_is_no_database_is_damage_and_not_an_operational_error(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    path.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(sqlite3.DatabaseError) as raised:
        open_wal(path)
    assert not isinstance(raised.value, sqlite3.OperationalError)


def test_damaged_files_are_set_aside_with_their_logs_under_free_names(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    for n in range(2):
        path.write_bytes(b"x")
        path.with_name("file.sqlite-wal").write_bytes(b"y")
        aside = set_aside_damaged(path)
        assert aside.name == f"file.sqlite.damaged-{n}"
        assert aside.with_name(aside.name + "-wal").read_bytes() == b"y"
    assert not path.exists()


def test_frames_of_the_log_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    assert count_wal_frames(path) == 0
    db = open_wal(path)
    db.execute("CREATE TABLE t (n)")
    one = count_wal_frames(path)
    db.execute("INSERT INTO t VALUES (1)")
    assert 0 < one < count_wal_frames(path)
    db.close()


def test_a_file_is_not_written_again_without_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up would stop others too."""
    with closing(open_wal(tmp_path / "file.sqlite")) as db:
        db.execute("CREATE TABLE t (n)")
        scrub_database(db)
        free = disk_usage(tmp_path)._replace(free=sqlite_file.MORE_ROOM)
        monkeypatch.setattr(sqlite_file, "disk_usage", lambda _: free)
        with pytest.raises(sqlite3.OperationalError, match="16 MiB of free space are needed"):
            scrub_database(db)
