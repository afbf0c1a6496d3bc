"""Going to the background: a child of its own session does the work, and whoever called leaves once it is ready.

What always holds: whoever called sees all that the child says until it is ready, and leaves with its exit status if it
ends before. The child is made before anything is started, for Ray's threads would not survive it.
"""

import os
import signal
import sys
from pathlib import Path

from stepwell.up.state_folder import StateFolder

CHUNK = 4096


def detach(folder: StateFolder) -> None:
    """Comes back in the child alone."""
    heard, said = os.pipe()
    child = os.fork()
    if child:
        os.close(said)
        sys.exit(_follow(child, heard, folder))
    os.close(heard)
    os.setsid()
    _point(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    _point(said, 2)


def fall_silent(log: Path) -> None:
    """Whoever called has heard enough, and leaves; what is said from now on goes to the log."""
    _point(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.dup2(1, 2)


def _point(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _follow(child: int, heard: int, folder: StateFolder) -> int:
    """The exit status."""
    while True:
        try:
            chunk = os.read(heard, CHUNK)
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
