"""What a child process does to itself before it runs someone else's code."""

import ctypes
import os
import resource
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PAGE = resource.getpagesize()


def die_with(parent: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(megabytes: int) -> None:
    """So much more address space than now, and no core dumps."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    limit = now + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
