"""A file system with nothing in it but Debian and a Python at /usr/local, as images of Python are, and commands in it.

It needs root, bubblewrap, and debootstrap, which fetches Debian's packages.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = (
    *("ca-certificates", "libbz2-1.0", "libexpat1", "libffi8", "liblzma5", "libncursesw6", "libnsl2", "libreadline8"),
    *("libsqlite3-0", "libssl3", "libtirpc3", "libuuid1", "netbase", "tzdata", "zlib1g"),
)
"""What CPython's own modules are linked with."""
NOT_COPIED = ("site-packages", "test", "config-*", "__pycache__")
REACHING_OUT = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/pip.conf")
"""How this machine finds, and trusts, indexes of packages."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def make_clean_root(root: Path) -> None:
    """Debian of this machine's release, and a copy of this Python with pip and nothing else."""
    assert os.geteuid() == 0, "a file system of one's own needs root"
    for program in ("bwrap", "debootstrap"):
        assert shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"), f"apt-get install {program}"
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    included = f"--include={','.join(PACKAGES)}"
    command = ["debootstrap", "--variant=minbase", included, release, str(root)]
    made = subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr
    _copy_python(root / "usr" / "local")
    run_inside(root, ["ldconfig"])
    run_inside(root, ["python", "-m", "ensurepip", "--default-pip"])


def _copy_python(target: Path) -> None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    home = Path(sys.base_prefix)
    shutil.copytree(home / "lib" / name, target / "lib" / name, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (target / "lib" / name / "site-packages").mkdir()
    for library in (home / "lib").glob(f"lib{name}*.so*"):
        shutil.copy2(library, target / "lib")
    shutil.copy2(home / "bin" / name, target / "bin" / name)
    for other in ("python3", "python"):
        (target / "bin" / other).symlink_to(name)


def run_inside(
    root: Path,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    folder: str = "/",
    user: str = "0",
    timeout: float = 3_600.0,
) -> str:
    """What it printed. Every process that it started is gone afterwards."""
    done = subprocess.run(
        [*_entered(root, folder), *_as_user(root, user), *command],
        env={"PATH": PATH, "HOME": _entry(root, user)[5], **_indexes(), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}"
    return done.stdout


def _entered(root: Path, folder: str) -> list[str]:
    outside = [word for path in REACHING_OUT if Path(path).exists() for word in ("--ro-bind", path, path)]
    temporary = [word for path in ("/tmp", "/dev/shm") for word in ("--perms", "1777", "--tmpfs", path)]
    parts = ("--bind", str(root), "/", *outside, "--proc", "/proc", "--dev", "/dev", *temporary)
    alone = ("--unshare-pid", "--as-pid-1", "--die-with-parent")
    return ["bwrap", *parts, "--cap-add", "ALL", *alone, "--chdir", folder]


def _as_user(root: Path, user: str) -> list[str]:
    """A number, as in USER of a Dockerfile: its group is the one that /etc/passwd has for it."""
    if user == "0":
        return []
    group = _entry(root, user)[3]
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all"]


def _entry(root: Path, user: str) -> list[str]:
    """The line of a user's number in /etc/passwd."""
    lines = (line.split(":") for line in (root / "etc" / "passwd").read_text().splitlines())
    return next(words for words in lines if words[2] == user)


def _indexes() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_PROXY")}
