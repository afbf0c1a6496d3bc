"""Sandbox: where the code, its test and a probe run, at a level that somebody chose, and never at a weaker one.

| level | |
|---|---|
| strict | bubblewrap: see bubblewrap.py and seccomp.py |
| user | another user's rights, which only root can give; with the machine's network, processes and readable files |
| none | the worker's own rights |

Time, memory, processes and sizes of files are limited on all levels. A level that this machine cannot give is an error
that says what to do.
"""

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stepwell.errors import NotReady, RewardFailed
from stepwell.rewards import candidate
from stepwell.rewards.candidate.probe_main import UNREADABLE
from stepwell.rewards.confinement.process import Cgroup, CgroupParent, ConfinedProcess, find_parent
from stepwell.rewards.confinement.seccomp import filter_program

MEGABYTE = 2**20
FILE_BYTES = 16 * MEGABYTE
PROCESSES = 32
OPEN_FILES = 64
PROBE_SECONDS = 30.0
PROBE_MEMORY_MB = 512
OWN_USERS = (2**30, 2**28)
"""The first of the user ids that belong to nobody, and how many there are."""
INSTALL = "install bubblewrap (apt-get install bubblewrap)"
ALLOW = (
    "let the worker make namespaces (docs/operations/security.md says how, also in containers), or choose a weaker "
    "level on a machine that you can lose: --sandbox user | none"
)
OPEN_PYTHON = (
    f"the code runs as another user, who must be able to read this Python: chmod -R o+rX {sys.prefix} "
    f"{sys.base_prefix}; at the level user, the folders above them must be open too (chmod o+x)"
)


class SandboxLevel(StrEnum):
    STRICT = "strict"
    USER = "user"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Sandbox:
    level: SandboxLevel
    bubblewrap: str | None = None
    cgroup_parent: CgroupParent | None = None

    @property
    def description(self) -> str:
        """The sandbox in words, for logs and the doctor."""
        limits = (
            f"control groups ({self.cgroup_parent.version})" if self.cgroup_parent else "limits for each process only"
        )
        return f"{DESCRIPTIONS[self.level]}; {limits}"

    def start(self, program: str, *, seconds: float, memory_mb: int, channel: int = 0) -> ConfinedProcess:
        """`program` is a module of stepwell.rewards.candidate; `channel` a descriptor that it inherits. The time limit
        is the caller's to watch; `seconds` limits the time on a CPU."""
        user = _own_user() if self.level is not SandboxLevel.NONE and os.geteuid() == 0 else None
        limits = {"user": user if self.bubblewrap else None, "rlimits": _rlimits(seconds, memory_mb)}
        arguments = (program, json.dumps(limits), str(channel))
        inherited = [channel] if channel else []
        cgroup = self.cgroup_parent.make(memory_mb, PROCESSES) if self.cgroup_parent else None
        enter = cgroup.enter_command() if cgroup else ()
        if self.bubblewrap is None:
            return self._start_plainly(enter, arguments, user, inherited, cgroup)
        python = (*_python(PROGRAMS_FOLDER), *arguments)
        with tempfile.TemporaryFile() as seccomp:
            seccomp.write(filter_program() or b"")
            seccomp.seek(0)
            command = (*enter, *bubblewrap_command(self.bubblewrap, seccomp=seccomp.fileno()), *python)
            return ConfinedProcess(
                command,
                folder=None,
                user=None,
                descriptors=[*inherited, seccomp.fileno()],
                clean_up=functools.partial(_remove, cgroup),
            )

    def _start_plainly(
        self,
        enter: tuple[str, ...],
        arguments: tuple[str, ...],
        user: int | None,
        inherited: list[int],
        cgroup: Cgroup | None,
    ) -> ConfinedProcess:
        folder = tempfile.TemporaryDirectory(prefix="stepwell-", ignore_cleanup_errors=True)
        programs = Path(candidate.__file__).parent
        if user is not None:
            programs = _give_programs(programs, Path(folder.name), user)

        def clean_up() -> None:
            if user is not None:
                _kill_user(user)
            _remove(cgroup)
            folder.cleanup()

        command = (*enter, *_python(str(programs)), *arguments)
        return ConfinedProcess(command, folder=folder.name, user=user, descriptors=inherited, clean_up=clean_up)

    def check(self) -> None:
        """NotReady if programs do not run, or if a strict sandbox has a hole."""
        with tempfile.NamedTemporaryFile(prefix="stepwell-", suffix="-secret") as secret:
            try:
                holes = self._probe(secret.name)
            except RewardFailed as failure:
                raise NotReady(f"no sandbox of level {self.level}: {failure}; {_what_to_do(str(failure))}") from None
        if UNREADABLE in holes:
            raise NotReady(f"no sandbox of level {self.level}: {UNREADABLE}; {OPEN_PYTHON}")
        if holes and self.level is SandboxLevel.STRICT:
            raise NotReady(f"the sandbox does not hold: {', '.join(holes)}; {ALLOW}")

    def _probe(self, secret: str) -> list[str]:
        with self.start("probe_main", seconds=PROBE_SECONDS, memory_mb=PROBE_MEMORY_MB) as probe:
            probe.wait_until_ready()
            probe.send(json.dumps({"secret": secret}).encode())
            output = probe.read_output(time.monotonic() + PROBE_SECONDS)
        try:
            holes: list[str] = json.loads(output)["holes"]
        except (ValueError, KeyError):
            raise RewardFailed("its probe did not answer") from None
        return holes


DESCRIPTIONS = {
    SandboxLevel.STRICT: "strict: in bubblewrap, without network, files and processes of the machine",
    SandboxLevel.USER: "user: as another user, with the machine's network and readable files",
    SandboxLevel.NONE: "none: with the rights of the reward worker",
}


@functools.cache
def open_sandbox(level: SandboxLevel) -> Sandbox:
    """Checked once per process. NotReady says what to do if this machine cannot give the level."""
    sandbox = Sandbox(level, _bubblewrap() if level is SandboxLevel.STRICT else None, find_parent())
    if level is SandboxLevel.USER and (os.geteuid() != 0 or _own_user() == NOBODY):
        raise NotReady("no sandbox of level user: only root, outside of a user namespace, can become another user")
    sandbox.check()
    return sandbox


def _bubblewrap() -> str:
    if not sys.platform.startswith("linux"):
        raise NotReady("no sandbox of level strict: it needs Linux; run reward workers for generated code there")
    if filter_program() is None:
        raise NotReady("no sandbox of level strict: the filter of system calls is for x86_64 and aarch64 only")
    found = find_bubblewrap()
    if found is None:
        raise NotReady(f"no sandbox of level strict: bwrap is not in the PATH; {INSTALL}")
    return found


def _python(programs: str) -> tuple[str, ...]:
    return (sys.executable, "-I", f"{programs}/start.py")


def _give_programs(programs: Path, folder: Path, user: int) -> Path:
    """A copy of the programs that the user can read: its own place may be in a home folder."""
    copy = folder / "candidate"
    shutil.copytree(programs, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, copy, *copy.iterdir()):
        os.chown(path, user, user)
    return copy


def _what_to_do(failure: str) -> str:
    """The advice after a program that did not start: bubblewrap itself failed, or the Python inside."""
    is_bubblewrap = "bwrap: " in failure and "execvp" not in failure
    return ALLOW if is_bubblewrap else OPEN_PYTHON


def _own_user() -> int:
    """A user id that no other process has; nobody where few ids are mapped."""
    first, count = OWN_USERS
    mapped = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    if any(int(inside) <= first and int(inside) + int(size) >= first + count for inside, _, size in mapped):
        return first + secrets.randbelow(count)
    return NOBODY


def _kill_user(user: int) -> None:
    """All processes of a user that only this sandbox has."""
    with suppress(OSError):
        subprocess.run(["/bin/sh", "-c", "kill -KILL -1"], user=user, group=user, extra_groups=[], check=False, env={})


def _remove(cgroup: Cgroup | None) -> None:
    if cgroup is not None:
        cgroup.remove()


def _rlimits(seconds: float, memory_mb: int) -> dict[str, int]:
    return {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_AS": memory_mb * MEGABYTE,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NPROC": PROCESSES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_CORE": 0,
    }
