"""The state folder: its owner, its lock, and the process that gets signals."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.commands.state_folder import RunRecord, StateFolder, send, started
from stepwell.errors import Conflict


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / ".stepwell")
    folder.make()
    return folder


def mine(**fields: object) -> RunRecord:
    return RunRecord(pid=os.getpid(), started=started(os.getpid()), **fields)  # type: ignore[arg-type]


def test_only_its_owner_reads_it_and_git_ignores_it(folder: StateFolder) -> None:
    folder.key()
    folder.ray_token()
    folder.write_environment({"A": "1"})
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for name in ("key", "ray_token", "env"):
        assert stat.S_IMODE((folder.path / name).stat().st_mode) == 0o600
    assert (folder.path / ".gitignore").read_text() == "*\n"


def test_the_key_is_strong_and_stays(folder: StateFolder) -> None:
    assert len(folder.key()) >= 32
    assert folder.key() == StateFolder(folder.path).key()


def test_a_shell_reads_the_environment_as_it_was_written(folder: StateFolder) -> None:
    folder.write_environment({"STEPWELL_KEY": "old"})
    folder.write_environment({"STEPWELL_KEY": "it's $HOME"})
    read = subprocess.run(
        ["sh", "-c", f". {folder.environment} && printenv STEPWELL_KEY"], capture_output=True, check=True
    )
    assert read.stdout == b"it's $HOME\n"


def test_a_second_process_is_refused_with_the_pid_of_the_first(folder: StateFolder) -> None:
    assert not folder.is_occupied()
    with folder.occupied():
        folder.write_record(mine(is_ready=True))
        assert folder.is_occupied()
        assert folder.record() == mine(is_ready=True)
        second = StateFolder(folder.path)
        with (
            pytest.raises(Conflict, match=rf"already \(pid {os.getpid()}\): `stepwell status` shows it"),
            second.occupied(),
        ):
            pass
        assert folder.record() is not None, "the second takes nothing from the first"
    assert not folder.is_occupied()
    assert folder.record() is None


def test_the_record_of_a_killed_process_is_recognised(folder: StateFolder) -> None:
    dying = (
        "import os, sys; from pathlib import Path; from stepwell.commands.state_folder import *\n"
        "folder = StateFolder(Path(sys.argv[1]))\n"
        "with folder.occupied():\n"
        "    folder.write_record(RunRecord(pid=os.getpid(), started=started(os.getpid())))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", dying, str(folder.path)], check=False).returncode == -signal.SIGKILL
    left = folder.record()
    assert left is not None
    assert not folder.is_occupied()
    assert not send(left, signal.SIGTERM)
    with folder.occupied():
        pass


def test_a_later_process_with_the_same_pid_gets_no_signal() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = started(child.pid)
    assert began is not None
    try:
        assert not send(RunRecord(pid=child.pid, started=began - 1), signal.SIGKILL)
        assert child.poll() is None
        assert send(RunRecord(pid=child.pid, started=began), signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
