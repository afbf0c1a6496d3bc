"""What `up` and `down` show while they work: a line for each thing done, and what is waited for.

In a terminal the last line says what is waited for, as it changes; elsewhere that is a line now and then.
"""

import time
from typing import TextIO

AGAIN = 5.0
"""Seconds between two lines that say the same."""
CLEAR = "\r\033[K"


class Screen:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started = time.monotonic()
        self._awaited: dict[str, str] = {}
        self._shown, self._shown_at = "", 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str, *, instead_of: str = "") -> None:
        """A line to stay, perhaps the one that ends a waiting."""
        self._awaited.pop(instead_of, None)
        self._write(f"{self._cleared()}{self._line(text)}\n")

    def show(self, text: str) -> None:
        """As it is, to be read or pasted."""
        self._write(f"{self._cleared()}{text}\n")

    def wait(self, what: str, why: str) -> None:
        """`what` is waited for still, and why; told as often as it pleases."""
        self._awaited[what] = why
        text = "waiting for " + " · ".join(f"{what}: {why}" for what, why in self._awaited.items())
        if self._out.isatty():
            self._write(f"{CLEAR}{self._line(text)}")
        elif text != self._shown or time.monotonic() > self._shown_at + AGAIN:
            self._shown, self._shown_at = text, time.monotonic()
            self._write(f"{self._line(text)}\n")

    def _line(self, text: str) -> str:
        return f"{self.seconds:6.1f} s  {text}"

    def _cleared(self) -> str:
        return CLEAR if self._out.isatty() else ""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
