"""A call with a time limit that holds whatever the call does: it runs in a fork of this process, which can be killed.

For calculations on an answer whose cost nobody can tell beforehand, such as 9^9^9^9: neither signals nor checks of the
text end those reliably.
"""

import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable

WALL_FACTOR = 4.0
"""The factor by which a call may exceed its CPU seconds on a busy machine."""
MOST_BYTES = 10_000
RETURNED = "returned "


def bounded_call(function: Callable[[], str], *, cpu_seconds: float) -> str | None:
    """The function's result; None if it raised, took too long, or ended its process."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _run_and_exit(function, write_end, cpu_seconds)
    os.close(write_end)
    try:
        answer = _read(read_end, time.monotonic() + WALL_FACTOR * cpu_seconds)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return answer.removeprefix(RETURNED) if answer.startswith(RETURNED) else None


def _run_and_exit(function: Callable[[], str], write_end: int, cpu_seconds: float) -> None:
    try:
        seconds = math.ceil(cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        os.write(write_end, f"{RETURNED}{function()}".encode()[:MOST_BYTES])
    finally:
        os._exit(0)


def _read(descriptor: int, deadline: float) -> str:
    data = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(descriptor, MOST_BYTES)
        if not chunk:
            return data.decode(errors="replace")
        data += chunk
    return ""
