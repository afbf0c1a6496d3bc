"""How much memory the processes of this machine, or of this container, have together; and giving some back."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
V2, V1 = "memory.max", "memory.limit_in_bytes"


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
