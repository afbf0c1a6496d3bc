"""What the demo shows while it runs: a line for each thing done, and the reward as it rises.

In a terminal the reward is a chart that is drawn anew with each update; elsewhere it is a line now and then.
"""

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from stepwell.demo.chart import bar, draw
from stepwell.trainers.metrics import Metrics

EVERY = 10
"""Updates between two lines."""


class Screen:
    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        sys.stdout.write(f"{self.seconds:6.1f} s  {text}\n")
        sys.stdout.flush()

    def rewards(self, updates: int, *, is_plotting: bool) -> "Rewards":
        return LiveRewards(updates) if is_plotting and sys.stdout.isatty() else Rewards(updates, self)


class Rewards(AbstractContextManager["Rewards"]):
    """One of a trainer's reports."""

    def __init__(self, updates: int, screen: Screen | None = None) -> None:
        self.updates = updates
        self.known: list[float] = []
        self._screen = screen

    def __call__(self, metrics: Metrics) -> None:
        self.known.append(metrics.reward)
        self.show()

    def show(self) -> None:
        if self._screen is not None and len(self.known) % EVERY == 0:
            mean = sum(self.known[-EVERY:]) / EVERY
            self._screen.say(f"update {len(self.known):4d} of {self.updates}  reward {mean:.3f}  {bar(mean)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left open."""


class LiveRewards(Rewards):
    def __init__(self, updates: int) -> None:
        from rich.live import Live

        super().__init__(updates)
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def show(self) -> None:
        from rich.text import Text

        under = f"      update {len(self.known)} of {self.updates}, reward {self.known[-1]:.3f}"
        self._live.update(Text(f"{draw(self.known, self.updates)}\n{under}"), refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
