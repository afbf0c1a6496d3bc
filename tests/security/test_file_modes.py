"""S11: what is recorded is readable by its owner only, also where the process has a permissive umask."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stepwell.common.files import open_wal, replacing_file

from stepwell.envs.scored_data import append_group
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.client.ray_cluster import LONGEST_PARENT, make_ray_folder
from stepwell.pool.shard.sqlite_journal import SqliteJournal

SOCKET = "/ray/session_2026-11-17_09-33-25_123456_4194304/sockets/plasma_store"
"""The longest that Ray makes, by the largest pid."""
LONGEST_SOCKET = 107


@pytest.fixture(autouse=True)
def permissive() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_a_database_and_its_log(tmp_path: Path) -> None:
    db = open_wal(tmp_path / "folder" / "file.sqlite")
    db.execute("CREATE TABLE t (n)")
    expected = {"folder": 0o700, "file.sqlite": 0o600, "file.sqlite-wal": 0o600, "file.sqlite-shm": 0o600}
    assert modes(tmp_path) == expected
    db.close()


def test_a_journal_and_its_lock(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal" / "pool.sqlite", closed_kept=1)
    assert {name: mode for name, mode in modes(tmp_path).items() if mode & 0o077} == {}
    assert "pool.sqlite.lock" in modes(tmp_path)
    journal.file.close()


def test_a_spool(tmp_path: Path) -> None:
    Spool(tmp_path / "spool" / "steps")
    assert {name: mode for name, mode in modes(tmp_path).items() if mode & 0o077} == {}


def test_a_file_that_is_replaced_and_the_groups_of_an_environment(tmp_path: Path) -> None:
    with replacing_file(tmp_path / "state.json") as file:
        file.write(b"{}")
    append_group(tmp_path / "groups.jsonl", {"tokens": [[1]]})
    assert modes(tmp_path) == {"state.json": 0o600, "groups.jsonl": 0o600}


def test_all_that_a_command_writes(tmp_path: Path) -> None:
    """A command that fails has set it before."""
    run = (
        "import os, sys\n"
        "from stepwell.cli import main\n"
        "try: main(['reward', 'try', '--on', 'nothing', '--function', 'none'])\n"
        "except SystemExit: pass\n"
        "os.mkdir(sys.argv[1]); open(sys.argv[1] + '/file', 'w').close()\n"
    )
    subprocess.run([sys.executable, "-c", run, str(tmp_path / "made")], check=True, capture_output=True)
    assert modes(tmp_path) == {"made": 0o700, "file": 0o600}


def test_the_folder_for_rays_files_is_private_and_short_enough_for_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = tmp_path / ("d" * LONGEST_PARENT)
    too_long.mkdir()
    for parent in ("/tmp", str(too_long)):
        monkeypatch.setenv("RAY_TMPDIR", parent)
        folder = make_ray_folder()
        try:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert len(str(folder) + SOCKET) <= LONGEST_SOCKET
        finally:
            folder.rmdir()
    assert LONGEST_PARENT + len("/sw-12345678") + len(SOCKET) <= LONGEST_SOCKET
