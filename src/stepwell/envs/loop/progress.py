"""The progress of an environment, and how it is shown: bars in a terminal, lines elsewhere.

- The cost of showing does not grow with the work, and showing never fails it.
- A line is printed when the state changes (paused, evaluating), and otherwise at long intervals.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from stepwell.envs.scored_data import ScoredDataGroup

EVERY = 10.0
"""Seconds between two lines."""


@dataclass(frozen=True, slots=True)
class EnvProgress:
    name: str
    done: int
    """Training steps; in `process`, groups written."""
    total: int
    """The total that `done` counts towards."""
    delivered: int
    """Groups sent, or written."""
    running: int
    """Groups in progress."""
    queue: int | None = None
    """Groups that wait for the trainer, as the rollout server last reported."""
    idle: str = ""
    """Why no groups are started now; empty while they are."""
    is_evaluating: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped groups, by cause."""


ShowProgress: TypeAlias = Callable[[EnvProgress], None]
"""Called often, so it must be fast."""


class GroupSink(Protocol):
    def write(self, group: ScoredDataGroup) -> None: ...


class ProgressLines:
    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._printed_at = float("-inf")
        self._printed: EnvProgress | None = None
        self._last: EnvProgress | None = None

    def update(self, progress: EnvProgress) -> None:
        self._last = progress
        has_changed = self._printed is None or state_text(self._printed) != state_text(progress)
        if has_changed or self._clock() - self._printed_at >= EVERY:
            self._print(progress)

    def close(self) -> None:
        """Prints the last progress, if it was not printed yet."""
        if self._last is not None and self._last != self._printed:
            self._print(self._last)

    def _print(self, progress: EnvProgress) -> None:
        self._printed, self._printed_at = progress, self._clock()
        self._say(f"{progress.name}: {progress.done}/{progress.total}, {progress_text(progress)}")


class ProgressBars:
    """One bar with text beside it; rich draws it at its own rate."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None

    def update(self, progress: EnvProgress) -> None:
        if self._task is None:
            self._task = self._bars.add_task(progress.name, total=None, words="")
        total = progress.total if progress.total > 0 else None
        self._bars.update(self._task, completed=progress.done, total=total, words=progress_text(progress))


@contextmanager
def showing() -> Iterator[ShowProgress]:
    """Bars if stdout is a terminal and rich is installed, else lines on stderr."""
    rich = _rich() if sys.stdout.isatty() else None
    if rich is not None:
        with _bars(rich) as bars:
            yield ProgressBars(bars).update
    else:
        lines = ProgressLines(_print_to_stderr)
        try:
            yield lines.update
        finally:
            lines.close()


def progress_text(progress: EnvProgress) -> str:
    parts = [f"delivered {progress.delivered}", f"under way {progress.running}"]
    if progress.queue is not None:
        parts.append(f"queue {progress.queue}")
    if state_text(progress):
        parts.append(state_text(progress))
    if progress.dropped:
        parts.append("dropped " + ", ".join(f"{count} ({cause})" for cause, count in sorted(progress.dropped.items())))
    return ", ".join(parts)


def state_text(progress: EnvProgress) -> str:
    states = (f"paused: {progress.idle}" if progress.idle else "", "evaluating" if progress.is_evaluating else "")
    return ", ".join(filter(None, states))


def _print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


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
