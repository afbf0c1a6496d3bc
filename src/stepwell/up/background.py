"""Continues a command in the background: a forked child does the work, and the caller leaves when it is ready.

- The caller prints everything that the child prints until it is ready.
- If the child ends before that, the caller leaves with the child's exit status.
- The fork happens before anything is started, because Ray's threads would not survive it.
"""

import os
import signal
import sys
from pathlib import Path

from stepwell.up.state_folder import StateFolder

CHUNK = 4096


def detach(folder: StateFolder) -> None:
    """Returns only in the child."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        sys.exit(_follow(child, read_end, folder))
    os.close(read_end)
    os.setsid()
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(write_end, 1)
    _redirect(write_end, 2)


def redirect_output(log: Path) -> None:
    """Send all further output to the log. This closes the pipe to the caller, which then leaves."""
    _redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.dup2(1, 2)


def _redirect(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _follow(child: int, read_end: int, folder: StateFolder) -> int:
    """Prints the child's output; returns the exit status."""
    while True:
        try:
            chunk = os.read(read_end, CHUNK)
        except KeyboardInterrupt:
            os.kill(child, signal.SIGTERM)
            continue
        if not chunk:
            break
        os.write(1, chunk)
    record = folder.record()
    if record is not None and record.pid == child and record.is_ready:
        return 0
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
