"""What a reward function prints: passed on to the worker, and kept for the text of an error, both up to a bound.

A function that prints without end must not keep anyone busy, so what is over the bound is dropped. Calls that run at
the same time do not see one another's output.
"""

import io
from contextvars import ContextVar
from typing import TextIO

KEPT = 2_000
"""Characters a call."""
NEXT_CALL = "\0"
"""Passed on between calls, so that the worker can tell whose output it reads."""

_kept: ContextVar[list[str] | None] = ContextVar("_kept", default=None)


class Printed(io.TextIOBase):
    """Stands in for sys.stdout and sys.stderr."""

    def __init__(self, outlet: TextIO) -> None:
        self._outlet = outlet
        self._is_marked = True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        kept = _kept.get()
        passed = text if kept is None else text[: max(0, KEPT - sum(map(len, kept)))]
        if passed:
            self._is_marked = False
            self._outlet.write(passed)
            self._outlet.flush()
        if passed and kept is not None:
            kept.append(passed)
        return len(text)

    def start_call(self) -> None:
        """What the current task prints from now on belongs to a new call."""
        _kept.set([])
        if not self._is_marked:
            self._is_marked = True
            self._outlet.write(NEXT_CALL)
            self._outlet.flush()

    def text(self) -> str:
        """What the current task's call has printed."""
        return "".join(_kept.get() or ())


def with_printed(why: str, printed: str) -> str:
    printed = printed.strip()
    return f"{why}; it printed:\n{printed}" if printed else why
