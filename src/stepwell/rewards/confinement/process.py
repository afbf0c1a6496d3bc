"""ConfinedProcess: one of the programs of stepwell.rewards.candidate in its sandbox, from its start to its end.

A control group limits all processes of a sandbox together, where this process may make groups: below or beside its own
group, or in the folder that STEPWELL_SANDBOX_CGROUP names. With cgroup v2 that folder must pass on the controllers
`memory` and `pids` (cgroup.subtree_control).
"""

import contextlib
import os
import secrets
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stepwell.common.processes import kill_group
from stepwell.errors import RewardFailed
from stepwell.rewards.candidate.start import READY

START_TIMEOUT = 60.0
"""Seconds until a program must be ready; its own time limit begins only then."""
LONGEST_OUTPUT = 10_000
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class ConfinedProcess:
    """Used in a `with` block, at whose end nothing of the program runs any more."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str | None,
        user: int | None,
        descriptors: Sequence[int],
        clean_up: Callable[[], None],
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        """RewardFailed if it cannot be started."""
        self._clean_up = clean_up
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._output = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=folder,
                env=environment,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError as failure:
            self._errors.close()
            raise RewardFailed(f"a confined program could not be started: {failure}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(OSError):
                file.close()

    def wait_until_ready(self) -> None:
        """RewardFailed if the program does not start: that is no fault of the code."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self._output.startswith(READY):
            if not self._read_some(deadline):
                raise RewardFailed(f"a sandbox did not start ({self.end_text()}): {self.errors() or 'no reason given'}")
        self._output = self._output.removeprefix(READY)

    def send(self, job: bytes) -> None:
        """The whole of its stdin. A process that has ended is noticed later."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(job)
            self._process.stdin.close()

    def read_output(self, deadline: float) -> bytes:
        """The output of the program until it closed its stdout, or until the deadline."""
        while self._read_some(deadline):
            pass
        return self._output

    def code_within(self, seconds: float) -> int | None:
        """Negative: the signal that ended it. None if it still runs."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code > 128 else code  # bubblewrap reports a signal as a shell does

    def end_text(self) -> str:
        code = self.code_within(1.0)
        return "it still runs" if code is None else f"code {code}"

    def errors(self) -> str:
        """The beginning of its stderr; nothing is written there after it is ready."""
        self._errors.seek(0)
        return self._errors.read(LONGEST_OUTPUT).decode(errors="replace").strip()

    def kill(self) -> None:
        """The sandbox as a whole: with bubblewrap ends the first process of the namespace, and with it all others."""
        kill_group(self._process)
        self._process.wait()
        self._clean_up()

    def _read_some(self, deadline: float) -> bool:
        """False at the end, at the deadline, or if there is too much."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
        chunk = os.read(descriptor, LONGEST_OUTPUT) if ready else b""
        self._output += chunk
        return bool(chunk) and len(self._output) <= LONGEST_OUTPUT


# -- control groups ----------------------------------------------------------------------------------------------------

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
    folders: tuple[Path, ...] = ()
    """Empty where no group can be made."""

    def enter_command(self) -> tuple[str, ...]:
        """A prefix: the command after it runs in the group. Empty if there is none."""
        if not self.folders:
            return ()
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
