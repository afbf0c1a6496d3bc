"""The state that a worker and its children share: the Job, the number of the running call, the output of the function.

- Messages are frames of common/child.py, first the Job. Samples go to the child as pickles. A child runs untrusted
  code, so its replies are JSON.
- Which call is running stands in memory that outlives the child, so a death is attributed to the sample whose call was
  running, and to no other. Each side writes one number and then reads the other: a withdrawn sample is either not
  called, or seen running.
- What a function prints goes to the worker, and is kept for error texts, both up to a limit, so that endless printing
  keeps nobody busy. Concurrent calls do not see each other's output.
"""

import io
import mmap
import os
import struct
import types
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar

from stepwell.rewards.confinement.sandbox import SandboxLevel
from stepwell.steps.step import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a child process is started for."""

    function: str
    """The name of the function, as rewards/loading.py reads it."""
    options: JsonObject = field(default_factory=dict)
    """The options of a built-in function."""
    folder: str = "."
    """The folder where the function runs, and where files and modules are searched first; absolute if workers run on
    other nodes."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without one, functions that read texts fail."""
    timeout: float = 30.0
    """Seconds that one call may take."""
    memory_mb: int = 2_048
    """Memory of a process beyond what it uses before the function is loaded."""
    children: int = 2
    """Processes."""
    sandbox: SandboxLevel = SandboxLevel.STRICT
    """Where generated code runs."""
    calls: int = 512
    """Concurrent calls of an async function, over all processes."""


# -- the running call --------------------------------------------------------------------------------------------------

NO_CALL = 0
NUMBER = struct.Struct("<Q")

T = TypeVar("T")


class RunningCallSlot:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 2 * NUMBER.size)

    @classmethod
    def make(cls) -> "RunningCallSlot":
        descriptor = os.memfd_create("stepwell-reward")
        os.ftruncate(descriptor, 2 * NUMBER.size)
        return cls(descriptor)

    def write(self, number: int) -> None:
        NUMBER.pack_into(self._memory, 0, number)

    def read(self) -> int:
        number: int = NUMBER.unpack_from(self._memory)[0]
        return number

    def withdraw(self, last: int) -> int:
        """The child skips all samples up to `last`, except the one whose call is running; returns that one."""
        NUMBER.pack_into(self._memory, NUMBER.size, last)
        return self.read()

    def claim(self, number: int) -> bool:
        """Marks the sample as running, unless it was withdrawn."""
        self.write(number)
        if number > NUMBER.unpack_from(self._memory, NUMBER.size)[0]:
            return True
        self.write(NO_CALL)
        return False

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


@types.coroutine
def track_call(call: Coroutine[Any, Any, T], number: int, slot: RunningCallSlot) -> Generator[Any, Any, T]:
    """Runs the call. The slot has its number while it holds the event loop, and not while it waits."""
    resume, value = call.send, None
    while True:
        slot.write(number)
        try:
            awaited = resume(value)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            slot.write(NO_CALL)
        try:
            resume, value = call.send, (yield awaited)
        except BaseException as thrown:  # noqa: BLE001 - passed on to the call
            resume, value = call.throw, thrown


# -- the output --------------------------------------------------------------------------------------------------------

LONGEST_OUTPUT = 2_000
"""Characters per call."""
NEXT_CALL = "\0"
"""Written between calls; the worker then knows which call printed what."""

_output_of_call: ContextVar[list[str] | None] = ContextVar("_output_of_call", default=None)


class CapturedOutput(io.TextIOBase):
    """Replaces sys.stdout and sys.stderr."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._is_separated = True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        parts = _output_of_call.get()
        accepted = text if parts is None else text[: max(0, LONGEST_OUTPUT - sum(map(len, parts)))]
        if accepted:
            self._is_separated = False
            self._target.write(accepted)
            self._target.flush()
        if accepted and parts is not None:
            parts.append(accepted)
        return len(text)

    def start_call(self) -> None:
        """Counts the current task's output from now on to a new call."""
        _output_of_call.set([])
        if not self._is_separated:
            self._is_separated = True
            self._target.write(NEXT_CALL)
            self._target.flush()

    def text(self) -> str:
        """The text that the call of the current task has printed."""
        return "".join(_output_of_call.get() or ())


def with_output(why: str, output: str) -> str:
    output = output.strip()
    return f"{why}; it printed:\n{output}" if output else why
