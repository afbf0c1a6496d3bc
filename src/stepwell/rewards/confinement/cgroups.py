"""Control groups: limits for all processes of a sandbox together, where this process may make groups.

A group is made below or beside the group of this process, or in the folder that STEPWELL_SANDBOX_CGROUP names.
With cgroup v2 that folder must pass on the controllers `memory` and `pids` (cgroup.subtree_control).
"""

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "STEPWELL_SANDBOX_CGROUP"
MOUNT = Path("/sys/fs/cgroup")
ENTER = 'for group in $STEPWELL_GROUPS; do echo 0 > "$group/cgroup.procs" || exit 1; done; exec "$@"'
MEGABYTE = 2**20
PREFIX = "stepwell"
OVERHEAD_MB = 64
"""The memory for bubblewrap, and for files in memory."""
REMOVE_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class Cgroup:
    folders: tuple[Path, ...]

    def enter_command(self) -> tuple[str, ...]:
        """A prefix: the command after it runs in the group."""
        groups = " ".join(map(str, self.folders))
        return ("/bin/sh", "-c", ENTER.replace("$STEPWELL_GROUPS", groups), "sh")

    def remove(self) -> None:
        """Kills what still runs in it. An ended process leaves its group a moment later."""
        deadline = time.monotonic() + REMOVE_TIMEOUT
        for folder in self.folders:
            while folder.exists():
                with suppress(OSError):
                    (folder / "cgroup.kill").write_text("1") if (folder / "cgroup.kill").exists() else None
                with suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """Where groups can be made: one folder with cgroup v2, one for each controller with v1."""

    version: str
    folders: Mapping[str, Path]

    def make(self, memory_mb: int, processes: int) -> Cgroup:
        name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        limits = {"memory": (memory_mb + OVERHEAD_MB) * MEGABYTE, "pids": processes + 4}
        made = []
        for controller, folder in self.folders.items():
            group = folder / name
            group.mkdir(exist_ok=True)
            for file in FILES[self.version, controller]:
                with suppress(FileNotFoundError):  # the kernel may count no swap
                    (group / file).write_text("0" if file.endswith("swap.max") else str(limits[controller]))
            made.append(group)
        return Cgroup(tuple(dict.fromkeys(made)))


FILES = {
    ("v2", "memory"): ("memory.max", "memory.swap.max"),
    ("v2", "pids"): ("pids.max",),
    ("v1", "memory"): ("memory.limit_in_bytes",),
    ("v1", "pids"): ("pids.max",),
}


def find_parent(mount: Path = MOUNT, own: Path = Path("/proc/self/cgroup")) -> CgroupParent | None:
    """None if this process may not make groups."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    paths = {controllers: path for _, controllers, path in lines}
    return _parent_v2(mount, paths.get("", "/")) or _parent_v1(mount, paths)


def _parent_v2(mount: Path, path: str) -> CgroupParent | None:
    here = mount / path.lstrip("/")
    named = os.environ.get(VARIABLE)
    for folder in (Path(named),) if named else (here, here.parent):
        with suppress(OSError):
            passed_on = (folder / "cgroup.subtree_control").read_text().split()
            parent = CgroupParent("v2", dict.fromkeys(("memory", "pids"), folder))
            if {"memory", "pids"} <= set(passed_on) and _works(parent):
                return parent
    return None


def _parent_v1(mount: Path, paths: Mapping[str, str]) -> CgroupParent | None:
    folders = {name: mount / name / paths.get(name, "/").lstrip("/") for name in ("memory", "pids")}
    parent = CgroupParent("v1", folders)
    return parent if all(folder.is_dir() for folder in folders.values()) and _works(parent) else None


def _works(parent: CgroupParent) -> bool:
    try:
        parent.make(64, 8).remove()
    except OSError:
        return False
    _remove_left_groups(parent)
    return True


def _remove_left_groups(parent: CgroupParent) -> None:
    """Empty groups of workers that were killed."""
    for folder in set(parent.folders.values()):
        for group in folder.glob(f"{PREFIX}-*-*"):
            if not Path("/proc", group.name.split("-")[1]).exists():
                with suppress(OSError):
                    group.rmdir()
