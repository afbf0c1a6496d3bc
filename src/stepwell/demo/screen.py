"""What the demo prints while it runs: one line for each finished part, and the reward; and its picture, a PNG.

In a terminal the reward is a chart that is redrawn with each update; elsewhere it is a line every few updates,
and a chart at the end.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from stepwell.common.imports import require
from stepwell.trainers.reporting import Report, UpdateMetrics

WIDTH, HEIGHT = 60, 10
TALL, WIDE = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
"""Cells filled by eighths, from below and from the left."""
SMOOTHED = 10
"""Updates in the running mean of the picture."""
EVERY = 10
"""Updates per line."""
Redraw: TypeAlias = Callable[[Sequence[float], str], None]
"""Draws the values of all updates, and a line below them."""


def draw(rewards: Sequence[float], updates: int, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Bars for rewards between 0 and 1; `updates` is the number of bars at the end of training."""
    width = min(width, updates)
    bounds = [column * updates // width for column in range(width + 1)]
    means = [_mean(rewards[start:end]) for start, end in pairwise(bounds)]
    labels = {height - 1: " 1.0 │", height // 2 - 1: " 0.5 │"}
    rows = [
        labels.get(row, "     │") + "".join(_cell(mean, row, height, TALL) for mean in means)
        for row in reversed(range(height))
    ]
    return "\n".join((*rows, f" 0.0 └{'─' * width}"))


def bar(reward: float, width: int = 30) -> str:
    return "".join(_cell(reward, place, width, WIDE) for place in range(width)).rstrip()


@contextmanager
def picture(title: str, xlabel: str, ylabel: str, path: Path) -> Iterator[Any]:
    """Axes for values between 0 and 1. They are written as a PNG at the end of the block."""
    require("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.02))
    yield axes
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def write_picture(rewards: Sequence[float], evaluations: Sequence[tuple[int, float]], title: str, path: Path) -> None:
    """The reward of each update and its running mean; `evaluations` are on held-out samples, by update."""
    updates = range(1, len(rewards) + 1)
    smoothed = [_mean(rewards[max(0, end - SMOOTHED) : end]) for end in updates]
    with picture(title, "update", "reward", path) as axes:
        axes.plot(updates, rewards, color="tab:blue", alpha=0.3, label="of each batch")
        axes.plot(updates, smoothed, color="tab:blue", label=f"mean of {SMOOTHED}")
        axes.plot(*zip(*evaluations, strict=True), "o", color="tab:orange", label="on held-out samples")


def _mean(rewards: Sequence[float]) -> float:
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else 0.0


def _cell(reward: float, place: int, places: int, eighths: str) -> str:
    filled = min(max(reward * places - place, 0.0), 1.0)
    return eighths[round(filled * (len(eighths) - 1))]


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
        rewards: list[float] = []
        with redrawn_chart(updates, is_plotting=is_plotting) as redraw:

            def show(metrics: UpdateMetrics) -> None:
                rewards.append(metrics.reward)
                if redraw is not None:
                    redraw(rewards, f"update {len(rewards)} of {updates}, reward {metrics.reward:.3f}")
                elif len(rewards) % EVERY == 0:
                    mean = sum(rewards[-EVERY:]) / EVERY
                    self.say(f"update {len(rewards):4d} of {updates}  reward {mean:.3f}  {bar(mean)}")

            yield show
        if is_plotting and redraw is None:
            self.say(f"the reward, update by update:\n{draw(rewards, updates)}")


@contextmanager
def redrawn_chart(updates: int, *, is_plotting: bool) -> Iterator[Redraw | None]:
    """A chart that is redrawn with each update; None where that is not possible."""
    if not is_plotting or not sys.stdout.isatty():
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda values, below: live.update(Text(f"{draw(values, updates)}\n      {below}"), refresh=True)
