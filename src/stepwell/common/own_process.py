"""Requests of a process to the system for itself: to end with its parent, to have limited memory, to know the memory of
its machine or container, and to give some back.

`python -m stepwell.common.own_process PARENT COMMAND…` becomes the command, and ends when PARENT ends. Only Linux can
do that; elsewhere the command just runs.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
V2, V1 = "memory.max", "memory.limit_in_bytes"


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


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(machine: int, mount: Path = MOUNT, own: Path = OWN) -> int:
    """Bytes: those of the machine, or the smallest limit of the control groups in which this process is."""
    return min([machine, *_limits(mount, own)])


def release_freed_memory() -> None:
    """Give the system back what the C library keeps of freed memory: much, after something large was parsed. Only glibc
    can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _limits(mount: Path, own: Path) -> Iterator[int]:
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers == "":
            yield from _limits_up_to(mount, path, V2)
        elif "memory" in controllers.split(","):
            yield from _limits_up_to(mount / "memory", path, V1)


def _limits_up_to(root: Path, path: str, name: str) -> Iterator[int]:
    """The limits of a group and of all above it. In a container the path may be one of the host: then only the root is
    there."""
    folder = root / path.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # the group is not here, or the limit is `max`
            yield int((place / name).read_text())


def main(parent: int, command: list[str]) -> None:
    set_parent_death_signal(parent, signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
