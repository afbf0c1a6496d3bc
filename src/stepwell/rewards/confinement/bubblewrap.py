"""The command line of bubblewrap: what a confined program sees.

- The root folder is read-only and has Python, its packages and the system's libraries. No home folder, no /etc but for
  the loader's cache and the time zone, no /run, no /var: no key, no journal, no socket of Ray.
- /proc shows its own processes, /dev the harmless devices; /tmp and /dev/shm are small and in memory.
- No network, and none of the machine's IPC objects, host name or control groups.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from stepwell.rewards import harness

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
HARNESS = "/harness"
"""Where the programs of `stepwell.rewards.harness` are inside."""
TMP_BYTES = 64 * 2**20
SHM_BYTES = 16 * 2**20
NOBODY = 65534


def find_bubblewrap() -> str | None:
    return shutil.which(PROGRAM)


def bubblewrap_command(bubblewrap: str, *, seccomp: int | None) -> list[str]:
    """Up to the program inside. `seccomp` is a descriptor to read the filter from.

    Root needs no user namespace to make the others: bubblewrap then keeps two capabilities, with which the program
    inside becomes a user that nobody else is (limits.py). Anyone else gets a user namespace and is nobody in it.
    """
    is_root = os.geteuid() == 0
    who = (
        ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if is_root
        else ["--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    )
    return [
        bubblewrap,
        *("--die-with-parent", "--new-session"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *who,
        *_folders(),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--hostname", "sandbox", "--remount-ro", "/"),
        *(() if seccomp is None else ("--seccomp", str(seccomp))),
        "--",
    ]


def _folders() -> Iterator[str]:
    for folder in map(Path, SYSTEM):
        if folder.is_symlink():
            yield from ("--symlink", str(folder.readlink()), str(folder))
        elif folder.is_dir():
            yield from ("--ro-bind", str(folder), str(folder))
    folders = _python_folders()
    yield from _parents([*folders, *map(Path, FILES)])
    for file in FILES:
        yield from ("--ro-bind-try", file, file)
    for prefix in folders:
        yield from ("--ro-bind", str(prefix.resolve()), str(prefix))
    yield from ("--ro-bind", str(Path(harness.__file__).parent), HARNESS)


def _parents(folders: list[Path]) -> Iterator[str]:
    """Bubblewrap would make them for root only."""
    parents = {parent: None for folder in folders for parent in reversed(folder.parents[:-1])}
    for parent in parents:
        if not parent.is_relative_to("/usr"):
            yield from ("--perms", "0755", "--dir", str(parent))


def _python_folders() -> list[Path]:
    """The environment, the installation that it was made from, and folders of packages; as named and as resolved."""
    real = Path(sys.executable).resolve().parent.parent
    packages = (Path(entry) for entry in sys.path if entry.endswith(("/site-packages", "/dist-packages")))
    named = [Path(sys.base_prefix), Path(sys.prefix), real, *filter(Path.is_dir, packages)]
    folders = {folder: None for each in named for folder in (each, each.resolve())}
    return [
        folder
        for folder in folders
        if not folder.is_relative_to("/usr") and not any(other in folder.parents for other in folders)
    ]
