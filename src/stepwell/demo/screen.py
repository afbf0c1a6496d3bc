"""What the demo prints while it runs: one line for each finished part, and the reward.

In a terminal the reward is a chart that is redrawn with each update; elsewhere it is a line every ten updates, and the
chart at the end.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepwell.demo.chart import bar, draw
from stepwell.trainers.reporting import Report, UpdateMetrics

if TYPE_CHECKING:
    from rich.live import Live

EVERY = 10
"""Updates per line."""


class DemoScreen:
    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        sys.stdout.write(f"{self.seconds:6.1f} s  {text}\n")
        sys.stdout.flush()

    @contextmanager
    def rewards(self, updates: int, *, is_plotting: bool) -> Iterator[Report]:
        """A report that shows the reward of each update."""
        if is_plotting and sys.stdout.isatty():
            from rich.live import Live

            with Live(auto_refresh=False) as live:
                yield LiveChart(live, updates)
            return
        rewards: list[float] = []

        def show(metrics: UpdateMetrics) -> None:
            rewards.append(metrics.reward)
            if len(rewards) % EVERY == 0:
                mean = sum(rewards[-EVERY:]) / EVERY
                self.say(f"update {len(rewards):4d} of {updates}  reward {mean:.3f}  {bar(mean)}")

        yield show
        if is_plotting:
            self.say(f"the reward, update by update:\n{draw(rewards, updates)}")


class LiveChart:
    """A chart that is redrawn with each update."""

    def __init__(self, live: "Live", updates: int) -> None:
        self._rewards: list[float] = []
        self._live = live
        self._updates = updates

    def __call__(self, metrics: UpdateMetrics) -> None:
        from rich.text import Text

        self._rewards.append(metrics.reward)
        below = f"      update {len(self._rewards)} of {self._updates}, reward {metrics.reward:.3f}"
        self._live.update(Text(f"{draw(self._rewards, self._updates)}\n{below}"), refresh=True)
