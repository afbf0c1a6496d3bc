"""The command line of bubblewrap: what a confined program sees.

- The root folder is read-only and has Python, its packages and the system's libraries. No home folder, no /etc but for
  the loader's cache and the time zone, no /run, no /var: no key, no journal, no socket of Ray.
- /proc shows its own processes, /dev the harmless devices; /tmp and /dev/shm are small and in memory.
- A Python in a home folder or below /tmp is there too, without the files beside it.
- No network, and none of the machine's IPC objects, host name or control groups.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from stepwell.rewards import candidate

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
PYTHON_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""The parts that Python needs of the folder that it, or a virtual environment, is installed in."""
PROGRAMS_FOLDER = "/candidate"
"""Where the programs of `stepwell.rewards.candidate` are inside."""
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
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *_folders(),  # after /tmp and /dev/shm, which would cover a Python below them
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
    python = _python_paths()
    links = [link for link in _executable_links() if not any(path in link.parents for path in python)]
    yield from _parents([*python, *links, *map(Path, FILES)])
    for file in FILES:
        yield from ("--ro-bind-try", file, file)
    for path in python:
        yield from ("--ro-bind", str(path.resolve()), str(path))
    for link in links:
        yield from ("--symlink", str(link.readlink()), str(link))
    yield from ("--ro-bind", str(Path(candidate.__file__).parent), PROGRAMS_FOLDER)


def _parents(paths: list[Path]) -> Iterator[str]:
    """Bubblewrap would make them for root only."""
    parents = {parent: None for path in paths for parent in reversed(path.parents[:-1])}
    for parent in parents:
        if not parent.is_relative_to("/usr"):
            yield from ("--perms", "0755", "--dir", str(parent))


def _python_paths() -> list[Path]:
    """The paths that Python needs: of the environment, of the installation that it was made from, and folders of
    packages; as named and as resolved. The rest of an environment's folder is left out: it may be a project's, or a
    home folder."""
    real = Path(sys.executable).resolve()
    prefixes = (Path(sys.base_prefix), Path(sys.prefix), real.parent.parent)
    packages = (Path(entry) for entry in sys.path if entry.endswith(("/site-packages", "/dist-packages")))
    named = [real, *(prefix / part for prefix in prefixes for part in PYTHON_PARTS), *packages]
    paths = {path: None for each in named if each.exists() for path in (each.absolute(), each.resolve())}
    return [path for path in paths if not _is_system(path) and not any(other in path.parents for other in paths)]


def _executable_links() -> Iterator[Path]:
    """The symbolic links from the name of this Python to its file, those of the system left out."""
    path = Path(sys.executable)
    while path.is_symlink():
        if not _is_system(path):
            yield path
        path = path.parent / path.readlink()


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SYSTEM)
