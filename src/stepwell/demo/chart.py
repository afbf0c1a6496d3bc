"""Charts: text for a terminal, and a PNG."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepwell.common.imports import require

WIDTH, HEIGHT = 60, 10
TALL, WIDE = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
"""Cells filled by eighths, from below and from the left."""
SMOOTHED = 10
"""Updates in the running mean of the picture."""


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
