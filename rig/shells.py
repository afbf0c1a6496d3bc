"""A new user's shell: nothing of the tests' own settings in it, and every process it starts can be found and ended."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rig.waiting import wait_until

MARK = "STEPWELL_TEST_SHELL"


@dataclass(frozen=True)
class Shell:
    folder: Path
    """Where its commands are run."""
    env: dict[str, str]

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """In a process group of its own, as a terminal does it."""
        return subprocess.Popen(
            command,
            env=self.env,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def run(self, *command: str, timeout: float = 120.0, status: int = 0) -> str:
        """What it printed. Something that it left running may hold its output: it is not waited for."""
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                command,
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout,
                check=False,
            )
            output.seek(0)
            printed = output.read()
        assert done.returncode == status, printed
        return printed

    def pids(self) -> list[int]:
        """The processes that were started here, daemons included."""
        return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and self._owns(folder)]

    def _owns(self, process: Path) -> bool:
        try:
            return f"{MARK}={self.env[MARK]}".encode() in (process / "environ").read_bytes()
        except OSError:
            return False


@contextmanager
def fresh_shell(folder: Path, **env: str) -> Iterator[Shell]:
    """`stepwell` and `python` are this environment's, unless PATH says otherwise. Afterwards all that it started is
    ended."""
    with tempfile.TemporaryDirectory(prefix="sw") as home:  # a short path: Ray puts sockets below it
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
        mark = {MARK: uuid.uuid4().hex}
        shell = Shell(folder, {**kept, "HOME": home, "RAY_TMPDIR": home, "HF_HUB_OFFLINE": "1", **env, **mark})
        try:
            yield shell
        finally:
            for pid in shell.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not shell.pids(), "the shell's processes to end")
