"""ConfinedProcess: one of the programs of stepwell.rewards.candidate in its sandbox, from its start to its end."""

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
