"""How far an export or an import has come."""

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from stepwell.common.command_line import ProgressLine
from stepwell.steps.groups import StepGroup


class TransferProgress:
    def __init__(
        self, total: int | None = None, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total` is the number of trajectories, if it is known."""
        self.trajectories = self.steps = self.nbytes = 0
        self._total, self._clock, self._started = total, clock, clock()
        self._line = ProgressLine(self.text, out, clock)

    def add(self, page: Sequence[StepGroup], nbytes: int) -> None:
        """Count more groups; `nbytes` is the total of all so far."""
        self.trajectories += sum(group.count() for group in page)
        self.steps += sum(len(group.columns) for group in page)
        self.nbytes = nbytes
        self._line.update()

    def text(self) -> str:
        seconds = max(self._clock() - self._started, 1e-3)
        total = "" if self._total is None else f" of {self._total:,}"
        amount = f"{self.trajectories:,}{total} trajectories, {self.steps:,} steps, {self.nbytes / 1e6:,.1f} MB"
        return f"{amount} in {seconds:.1f} s ({self.steps / seconds:,.0f} steps/s)"

    def close(self) -> str:
        """Clear the line and return the final text."""
        self._line.clear()
        self._total = None
        return self.text()
