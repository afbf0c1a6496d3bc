import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rig.waiting import until, wait_until
from stepwell.common import processes
from stepwell.common.listening import free_port
from stepwell.common.processes import CommandFailed, end_group, exit_text, kill_marked, run_command
from stepwell.errors import NotReady

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""


MARKS = ("this-run", "this-run-of-another")


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_a_command_gets_its_stdin_and_environment_and_gives_its_last_lines() -> None:
    code = "import os, sys; print(*range(1000), sep='\\n'); print(os.environ['WHO'], sys.stdin.read())"
    output = await run_command(python(code), env={"WHO": "me"}, stdin=b"hello")
    assert output.splitlines()[-2:] == ["999", "me hello"]
    assert len(output.splitlines()) == 200


async def test_a_command_that_reads_nothing_and_prints_without_line_ends_does_no_harm() -> None:
    code = "import sys; sys.stdout.write('x' * 5_000_000); sys.stderr.write('y' * 1_000_000)"
    output = await run_command(python(code), env={}, stdin=b"z" * 1_000_000)
    assert len(output) < 100_000


async def test_a_command_that_fails_says_how_with_its_last_words() -> None:
    with pytest.raises(CommandFailed, match="exit code 3: it went wrong"):
        await run_command(python("import sys; sys.stderr.write('it went wrong'); sys.exit(3)"), env={}, stdin=b"")
    with pytest.raises(CommandFailed, match="SIGKILL"):
        await run_command(python("import os; os.kill(os.getpid(), 9)"), env={}, stdin=b"")
    with pytest.raises(CommandFailed, match="no/such/program cannot be started"):
        await run_command(["no/such/program"], env={}, stdin=b"")


async def test_a_cancelled_command_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    running = asyncio.create_task(run_command(python(STUBBORN, str(pids), "600"), env={}, stdin=b""))
    await until(pids.exists, "the command to start its child")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    parent, child = map(int, pids.read_text().split())
    await until(lambda: not is_alive(parent) and not is_alive(child), "both to be gone")


async def test_what_a_command_leaves_running_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with asyncio.timeout(60):
        await run_command(python(STUBBORN, str(pids), "0"), env={}, stdin=b"")
    _, child = map(int, pids.read_text().split())
    await until(lambda: not is_alive(child), "its child to be gone")


def test_a_process_and_all_that_it_started_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = subprocess.Popen(python(STUBBORN, str(pids), "600"), start_new_session=True)
    wait_until(pids.exists, "the command to start its child")
    end_group(process, timeout=0.5)  # it ignores SIGTERM
    assert not any(map(is_alive, map(int, pids.read_text().split())))
    assert exit_text(process.wait()) == "signal 9 (SIGKILL)"
    assert exit_text(3) == "exit code 3"


def test_processes_with_a_mark_are_killed_also_in_sessions_of_their_own_and_no_others(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    marked, other = (
        subprocess.Popen(python(STUBBORN, f"{pids}-{mark}", "600"), env={"MARK": mark}, start_new_session=True)
        for mark in MARKS
    )
    try:
        for mark in MARKS:
            wait_until(Path(f"{pids}-{mark}").exists, "the process to start its child")
        kill_marked("MARK", "this-run")
        assert marked.wait(timeout=10) == -9
        alive = {mark: is_alive(int(Path(f"{pids}-{mark}").read_text().split()[1])) for mark in MARKS}
        assert alive == {"this-run": False, "this-run-of-another": True}
        assert other.poll() is None
    finally:
        end_group(other, timeout=0.1)


def test_a_free_port_is_none_that_a_connection_gets_before_a_child_listens_there() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    ports = {free_port("127.0.0.1") for _ in range(50)}

    assert not [port for port in ports if first <= port <= last]
    assert len(ports) > 40, "two children that start at once seldom get the same"


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(processes, "CHILD_PORTS", (port, port + 1))
        monkeypatch.setattr(processes, "PORT_TRIES", 1)
        with pytest.raises(NotReady, match="none is free"):
            free_port("127.0.0.1")
