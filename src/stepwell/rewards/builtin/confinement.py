"""The strongest confinement this machine has for a program that is not trusted, and how one is run in it.

What always holds: a wall clock that outlives whoever started the program, an environment with nothing of this one's,
and a folder of its own that is gone afterwards. The program itself sets its rlimits. Beyond that, the first of these
that works:

1. namespaces of its own, as nobody: no network, no other process in sight, no file but what everyone may read or write;
2. namespaces of its own: the same, but with this user's files;
3. nobody, without namespaces: the network is there;
4. nothing: network, files and processes of this user are within reach.

Only root can become nobody. Where users may not make namespaces (many containers), 3 or 4 is what remains; there, a
process that leaves its session can outlive the program. The kernel does not hold root to a limit of processes, so 2 and
4 as root have none.
"""

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stepwell.errors import RewardFailed

NOBODY = 65534
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
GRACE = 30.0
"""Seconds over its wall clock after which a program is given up: the machine, not the program, is at fault."""
OUTPUT_KEPT = 2_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Confinement:
    what: str
    prefix: tuple[str, ...] = ()
    user: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    output: bytes
    """The beginning of what it wrote to stdout."""
    said: str
    """The same of stderr, in words for a log."""
    code: int
    """Negative: the signal that ended it, where that could be seen."""
    timed_out: bool


def run_confined(program: Path, question: bytes, *, seconds: float, held: Confinement | None = None) -> Ended:
    """Run a Python file in isolated mode, with the question on its stdin."""
    held = held or strongest()
    with tempfile.TemporaryDirectory(prefix="stepwell-") as folder, tempfile.TemporaryFile() as output:
        if held.user is not None:
            os.chown(folder, held.user, held.user)
        with tempfile.TemporaryFile() as errors:
            began = time.monotonic()
            code = _run(held, program, question, seconds, folder, output, errors)
            timed_out = time.monotonic() - began >= seconds
            return Ended(_beginning(output), _beginning(errors).decode(errors="replace").strip(), code, timed_out)


@functools.cache
def strongest() -> Confinement:
    """Tried once a process, with a program that does nothing."""
    with tempfile.NamedTemporaryFile(suffix=".py") as nothing:
        Path(nothing.name).chmod(0o644)
        for held in _kinds():
            if run_confined(Path(nothing.name), b"", seconds=GRACE, held=held).code == 0:
                log.info("programs that are not trusted run with: %s", held.what)
                return held
    raise RewardFailed(f"no program can be run with {sys.executable}")


def _kinds() -> Iterator[Confinement]:
    may_isolate, is_root = shutil.which(NAMESPACES[0]) is not None, os.geteuid() == 0
    if may_isolate and is_root:
        yield Confinement("namespaces of their own, as nobody", NAMESPACES, NOBODY)
    if may_isolate:
        yield Confinement("namespaces of their own", NAMESPACES)
    if is_root:
        yield Confinement("nobody's rights, and network", (), NOBODY)
    yield Confinement("this user's rights, and network")


def _run(
    held: Confinement, program: Path, question: bytes, seconds: float, folder: str, output: IO[bytes], errors: IO[bytes]
) -> int:
    command = ["timeout", "--signal=KILL", f"{seconds:.3f}", *held.prefix, sys.executable, "-I", str(program)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            user=held.user,
            group=held.user,
            extra_groups=None if held.user is None else [],
            start_new_session=True,
        )
    except OSError as failure:
        raise RewardFailed(f"a confined program could not be started: {failure}") from None
    with process:
        try:
            process.communicate(question, timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            raise RewardFailed(f"a confined program outlived its {seconds:g} s by {GRACE:g} s") from None
        finally:
            _end_group(process.pid)
    return process.returncode


def _end_group(leader: int) -> None:
    """What the program started and left behind, where no namespace ended it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _beginning(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(OUTPUT_KEPT)
