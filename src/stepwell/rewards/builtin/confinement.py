"""The strongest confinement that this machine has for an untrusted program, and how a program runs in it.

Every program has a time limit that works even if this process dies, an empty environment, and a folder of its own that
is deleted afterwards. The program itself sets its rlimits. In addition, the first of these that works:

1. its own namespaces, as nobody: no network, no other processes, only files that everyone may read or write;
2. its own namespaces: the same, but with this user's files;
3. nobody, without namespaces: with the network;
4. nothing: with the network, files and processes of this user.

Only root can become nobody. Where users may not make namespaces (many containers), 3 or 4 remains; there, a process
that leaves its session can outlive the program. The kernel does not limit the processes of root, so 2 and 4 as root
have no such limit.
"""

import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stepwell.common.processes import kill_group
from stepwell.errors import RewardFailed

NOBODY = 65534
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
GRACE = 30.0
"""Seconds beyond its time limit after which a program is given up as a fault of the machine."""
LONGEST_OUTPUT = 2_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Confinement:
    description: str
    prefix: tuple[str, ...] = ()
    user: int | None = None


@dataclass(frozen=True, slots=True)
class ConfinedRun:
    output: bytes
    """The beginning of its stdout."""
    errors: str
    """The beginning of its stderr."""
    code: int
    """Negative: the signal that ended it, if known."""
    timed_out: bool


def run_confined(program: Path, stdin: bytes, *, seconds: float, confinement: Confinement | None = None) -> ConfinedRun:
    """Runs a Python file in isolated mode."""
    confinement = confinement or strongest()
    command = ["timeout", "--signal=KILL", f"{seconds:.3f}", *confinement.prefix, sys.executable, "-I", str(program)]
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-") as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        if confinement.user is not None:
            os.chown(folder, confinement.user, confinement.user)
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                user=confinement.user,
                group=confinement.user,
                extra_groups=None if confinement.user is None else [],
                start_new_session=True,
            )
        except OSError as failure:
            raise RewardFailed(f"a confined program could not be started: {failure}") from None
        _run_to_end(process, stdin, seconds)
        error_text = _beginning(errors).decode(errors="replace").strip()
        return ConfinedRun(_beginning(output), error_text, process.returncode, time.monotonic() - began >= seconds)


@functools.cache
def strongest() -> Confinement:
    """Tried once per process, with an empty program."""
    with tempfile.NamedTemporaryFile(suffix=".py") as nothing:
        Path(nothing.name).chmod(0o644)
        for confinement in _confinements():
            if run_confined(Path(nothing.name), b"", seconds=GRACE, confinement=confinement).code == 0:
                log.info("untrusted programs run with: %s", confinement.description)
                return confinement
    raise RewardFailed(f"no program can be run with {sys.executable}")


def _confinements() -> Iterator[Confinement]:
    may_isolate, is_root = shutil.which(NAMESPACES[0]) is not None, os.geteuid() == 0
    if may_isolate and is_root:
        yield Confinement("their own namespaces, as nobody", NAMESPACES, NOBODY)
    if may_isolate:
        yield Confinement("their own namespaces", NAMESPACES)
    if is_root:
        yield Confinement("nobody's rights, and network", (), NOBODY)
    yield Confinement("this user's rights, and network")


def _run_to_end(process: subprocess.Popen[bytes], stdin: bytes, seconds: float) -> None:
    with process:
        try:
            process.communicate(stdin, timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            raise RewardFailed(f"a confined program outlived its {seconds:g} s by {GRACE:g} s") from None
        finally:
            kill_group(process)  # what the program left running, if no namespace ended it


def _beginning(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(LONGEST_OUTPUT)
