"""How far an environment is, for whoever watches: bars in a terminal, lines elsewhere.

What always holds: showing costs nothing that grows with the work, and never fails it. Lines come when something begins
or ends to hold the work up, and else at long intervals.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepwell.envs.loop.progress import Progress, Show

EVERY = 10.0
"""Seconds between two lines."""


@contextmanager
def showing() -> Iterator[Show]:
    """Bars where stdout is a terminal and rich is there, else lines on stderr."""
    rich = _rich() if sys.stdout.isatty() else None
    if rich is not None:
        with _bars(rich) as bars:
            yield Bars(bars)
    else:
        lines = Lines(_say)
        try:
            yield lines
        finally:
            lines.close()


class Lines:
    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said_at = float("-inf")
        self._said: Progress | None = None
        self._last: Progress | None = None

    def update(self, progress: Progress) -> None:
        self._last = progress
        has_turned = self._said is None or mood_of(self._said) != mood_of(progress)
        if has_turned or self._clock() - self._said_at >= EVERY:
            self._tell(progress)

    def close(self) -> None:
        """Say how it ended."""
        if self._last is not None and self._last != self._said:
            self._tell(self._last)

    def _tell(self, progress: Progress) -> None:
        self._said, self._said_at = progress, self._clock()
        self._say(f"{progress.name}: {progress.done}/{progress.total}, {words_of(progress)}")


class Bars:
    """One bar, with words beside it; drawn by rich, in its own time."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None

    def update(self, progress: Progress) -> None:
        if self._task is None:
            self._task = self._bars.add_task(progress.name, total=None, words="")
        total = progress.total if progress.total > 0 else None
        self._bars.update(self._task, completed=progress.done, total=total, words=words_of(progress))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def words_of(progress: Progress) -> str:
    parts = [f"delivered {progress.delivered}", f"under way {progress.running}"]
    if progress.queue is not None:
        parts.append(f"queue {progress.queue}")
    if mood_of(progress):
        parts.append(mood_of(progress))
    if progress.dropped:
        parts.append("dropped " + ", ".join(f"{count} ({cause})" for cause, count in sorted(progress.dropped.items())))
    return ", ".join(parts)


def mood_of(progress: Progress) -> str:
    """What it is at besides making groups."""
    moods = (f"paused: {progress.idle}" if progress.idle else "", "evaluating" if progress.is_evaluating else "")
    return ", ".join(filter(None, moods))


def _bars(rich: Any) -> Any:
    return rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=24),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[words]}", markup=False),
        redirect_stderr=sys.stderr.isatty(),
        expand=True,
    )


def _rich() -> Any:
    try:
        import rich.progress
    except ModuleNotFoundError:
        return None
    return rich.progress
