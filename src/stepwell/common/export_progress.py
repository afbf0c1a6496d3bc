"""How far an export or an import is: one line that is written over in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

EVERY = 10.0
IN_A_TERMINAL = 0.2
"""Seconds between two lines."""


class Progress:
    def __init__(
        self, of: int | None = None, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`of` so many trajectories, if that is known."""
        self.trajectories = self.steps = self.nbytes = 0
        self._of, self._out, self._clock = of, out or sys.stderr, clock
        self._began = self._told = clock()

    def add(self, trajectories: int, steps: int, nbytes: int) -> None:
        """So many more; `nbytes` in all."""
        self.trajectories += trajectories
        self.steps += steps
        self.nbytes = nbytes
        is_terminal = self._out.isatty()
        if self._clock() - self._told >= (IN_A_TERMINAL if is_terminal else EVERY):
            self._told = self._clock()
            self._out.write(f"\r\x1b[K{self.words()}" if is_terminal else f"{self.words()}\n")
            self._out.flush()

    def words(self) -> str:
        seconds = max(self._clock() - self._began, 1e-3)
        of = "" if self._of is None else f" of {self._of:,}"
        amount = f"{self.trajectories:,}{of} trajectories, {self.steps:,} steps, {self.nbytes / 1e6:,.1f} MB"
        return f"{amount} in {seconds:.1f} s ({self.steps / seconds:,.0f} steps/s)"

    def close(self) -> str:
        """Clear the line; gives the last words."""
        if self._out.isatty():
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._of = None
        return self.words()
