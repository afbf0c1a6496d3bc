"""What the demo prints while it runs: one line for each finished part, and the reward, or the acceptance by users; and
its picture, a PNG.

In a terminal these are a chart that is redrawn with each update; elsewhere they are a line every few updates, and the
reward is a chart at the end.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from stepwell.common.optional import require
from stepwell.pool.api.policy import Canary, PolicyDecision
from stepwell.trainers.reporting import Report, UpdateMetrics

WIDTH, HEIGHT = 60, 10
TALL, WIDE = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
"""Cells filled by eighths, from below and from the left."""
SMOOTHED = 10
"""Updates in the running mean of the picture."""
EVERY, EVERY_LIVE = 10, 4
"""Updates per line."""
AGAINST = {"rollback": "rolled back", "refuse": "refused"}
"""The guard's decisions against a version."""
Redraw: TypeAlias = Callable[[Sequence[float], str], None]
"""Draws the values of all updates, and a line below them."""


def draw(rewards: Sequence[float], updates: int, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Bars for rewards between 0 and 1; `updates` is the number of bars at the end of training."""
    width = min(width, updates)
    bounds = [column * updates // width for column in range(width + 1)]
    means = [_mean(rewards[start:end]) for start, end in pairwise(bounds)]
    rows = [
        _label(row, height) + "".join(_cell(mean, row, height, TALL) for mean in means)
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
    with picture(title, "update", "reward", path) as axes:
        axes.plot(updates, rewards, color="tab:blue", alpha=0.3, label="of each batch")
        axes.plot(updates, _smooth(rewards), color="tab:blue", label=f"mean of {SMOOTHED}")
        axes.plot(*zip(*evaluations, strict=True), "o", color="tab:orange", label="on held-out samples")


def _smooth(rewards: Sequence[float]) -> list[float]:
    return [_mean(rewards[max(0, end - SMOOTHED) : end]) for end in range(1, len(rewards) + 1)]


def _mean(rewards: Sequence[float]) -> float:
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else 0.0


def _label(row: int, height: int) -> str:
    return {height - 1: " 1.0 │", height // 2 - 1: " 0.5 │"}.get(row, "     │")


def _cell(reward: float, place: int, places: int, eighths: str) -> str:
    filled = min(max(reward * places - place, 0.0), 1.0)
    return eighths[round(filled * (len(eighths) - 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """One moment of a live run."""

    update: int
    updates: int
    acceptance: float | None
    """The share of the last replies that users accepted."""
    version: int
    """The version that all users get, except those of the canary."""
    canary: Canary | None
    decisions: Sequence[PolicyDecision] = ()
    """The guard's decisions since the moment before."""

    def text(self) -> str:
        shown = "unknown" if self.acceptance is None else f"{self.acceptance:.3f}"
        canary = self.canary
        tried = f", canary {canary.version} for {canary.share:.0%} of sessions" if canary is not None else ""
        return f"update {self.update:3d} of {self.updates}  acceptance {shown}  version {self.version}{tried}"


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
        with _chart(updates, is_plotting=is_plotting) as redraw:

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
    def acceptance(self, updates: int, *, is_plotting: bool) -> Iterator[Callable[[LiveStatus], None]]:
        """Shows the acceptance by users with each update. A rollback or a refusal is always a line."""
        shares: list[float] = []
        with _chart(updates, is_plotting=is_plotting) as redraw:

            def show(status: LiveStatus) -> None:
                for decision in status.decisions:
                    if (what := AGAINST.get(decision.action)) is not None:
                        self.say(f"version {decision.version} was {what} by {decision.by}: {decision.reason}")
                shares.append(status.acceptance or 0.0)
                if redraw is not None:
                    redraw(shares, status.text())
                elif status.update % EVERY_LIVE == 0:
                    self.say(f"{status.text()}  {bar(shares[-1], 20)}")

            yield show


@contextmanager
def _chart(updates: int, *, is_plotting: bool) -> Iterator[Redraw | None]:
    """A chart that is redrawn with each update; None where that is not possible."""
    if not is_plotting or not sys.stdout.isatty():
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda values, below: live.update(Text(f"{draw(values, updates)}\n      {below}"), refresh=True)
