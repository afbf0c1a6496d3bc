"""Processes on loopback, what they cost, and how they are asked."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.gateway_rig.load import Load, Order
from rig.waiting import answers, wait_until

START_TIMEOUT = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: object = None, *, method: str = "", key: str = "") -> Any:
        """One request, with a JSON body where one is given; gives the JSON of the answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(
            self.url + path, data, headers, method=method or ("GET" if data is None else "POST")
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")


@contextmanager
def serving(
    command: Sequence[str | Path],
    log: Path,
    *,
    ready: str = "/health",
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server that answers `ready`, ended with all that it started. `{port}` in the command is where it listens."""
    port = port or free_port()
    words = [str(word).replace("{port}", str(port)) for word in command]
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=output, env={**os.environ, **(env or {})}, start_new_session=True
        )
    server = Server(port, process.pid)
    try:
        wait_until(lambda: process.poll() is not None or answers(server.url + ready), f"{words[:4]}", START_TIMEOUT)
        assert process.poll() is None, f"{words[:4]} ended:\n{log.read_text()[-4000:]}"
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def module(name: str, *args: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gateway_rig.{name}", "--port", "{port}", *args]


class LoadProcess:
    """The clients, in a process of their own, which ends with the `with` block."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.gateway_rig.load"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, order: Order) -> Load:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the load generator ended"
        return Load(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def cpu_seconds(root: int) -> float:
    """What a process and its descendants have used, those that have ended and were waited for included."""
    return sum(_ticks(pid) for pid in family(root)) / TICKS


def exact_cpu_seconds(*pids: int) -> float:
    """What these processes have used, to the nanosecond, for short moments. Threads that have ended are left out."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(map(_ran_ns, tasks)) / 1e9


def starved_seconds(pid: int) -> float:
    """For how long its main thread was ready to run and no core was free: what else the machine did then."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def family(root: int) -> list[int]:
    """A process and its living descendants."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory_bytes(pid: int) -> int:
    """What it holds in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def forget_peak(pid: int) -> None:
    """Let `peak_memory_bytes` begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _ran_ns(task: Path) -> int:
    with suppress(OSError):
        return int((task / "schedstat").read_text().split()[0])
    return 0


def _parent(process: Path) -> int:
    with suppress(OSError):
        return int(_stat(process)[1])
    return 0


def _ticks(pid: int) -> int:
    return sum(int(value) for value in _stat(Path(f"/proc/{pid}"))[11:15])


def _stat(process: Path) -> list[str]:
    """The fields after the process's name, which may hold anything; the first is its state."""
    return (process / "stat").read_text().rpartition(")")[2].split()
