"""`python -m stepwell.common.own_process PARENT COMMAND…`: becomes the command, and ends when PARENT ends.

Only Linux can do that; elsewhere the command just runs. The functions are for programs that limit themselves.
"""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def set_parent_death_signal(parent: int, number: signal.Signals) -> None:
    """The kernel sends this process the signal when its parent ends. If the parent has ended already, exit now."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def limit_memory(megabytes: int) -> None:
    """Allow this process so much more address space than it has now, and no core dumps."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = now + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(parent: int, command: list[str]) -> None:
    set_parent_death_signal(parent, signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
