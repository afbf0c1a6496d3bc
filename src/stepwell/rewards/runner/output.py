"""The output of a reward function: sent to the worker, and kept for error texts, both up to a limit.

Output beyond the limit is dropped, so that endless printing keeps nobody busy. Concurrent calls do not see each other's
output.
"""

import io
from contextvars import ContextVar
from typing import TextIO

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
