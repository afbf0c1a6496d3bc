"""What a live run prints: acceptance with each update, the version that users get, the canary, and each rollback.

In a terminal it is a chart that is redrawn with each update; elsewhere it is a line every few updates. A rollback or a
refusal is always a line.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stepwell.demo.chart import bar, draw
from stepwell.demo.screen import DemoScreen
from stepwell.pool.api.policy import Canary, PolicyDecision

if TYPE_CHECKING:
    from rich.live import Live

EVERY = 4
"""Updates per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """One moment of a run."""

    update: int
    updates: int
    acceptance: float | None
    """Of the last replies."""
    version: int
    """That all users get, except those of the canary."""
    canary: Canary | None
    decisions: Sequence[PolicyDecision] = ()
    """Those since the moment before."""

    def text(self) -> str:
        shown = "unknown" if self.acceptance is None else f"{self.acceptance:.3f}"
        return f"update {self.update:3d} of {self.updates}  acceptance {shown}  {self.versions()}"

    def versions(self) -> str:
        if self.canary is None:
            return f"version {self.version}"
        return f"version {self.version}, canary {self.canary.version} for {self.canary.share:.0%} of sessions"


ShowStatus: TypeAlias = Callable[[LiveStatus], None]


def notable(decisions: Sequence[PolicyDecision]) -> Iterator[str]:
    """A line for each decision against a version."""
    for decision in decisions:
        if decision.action in ("rollback", "refuse"):
            done = "rolled back" if decision.action == "rollback" else "refused"
            yield f"version {decision.version} was {done} by {decision.by}: {decision.reason}"


@contextmanager
def show_live(screen: DemoScreen, updates: int, *, is_plotting: bool) -> Iterator[ShowStatus]:
    if is_plotting and sys.stdout.isatty():
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield AcceptanceChart(live, updates, screen.say)
        return

    def show(status: LiveStatus) -> None:
        for line in notable(status.decisions):
            screen.say(line)
        if status.update % EVERY == 0:
            screen.say(f"{status.text()}  {bar(status.acceptance or 0.0, 20)}")

    yield show


class AcceptanceChart:
    """A chart that is redrawn with each update."""

    def __init__(self, live: "Live", updates: int, say: Callable[[str], None]) -> None:
        self._acceptances: list[float] = []
        self._live = live
        self._updates = updates
        self._say = say

    def __call__(self, status: LiveStatus) -> None:
        from rich.text import Text

        for line in notable(status.decisions):
            self._say(line)
        self._acceptances.append(status.acceptance or 0.0)
        chart = draw(self._acceptances, self._updates)
        self._live.update(Text(f"{chart}\n      {status.text()}"), refresh=True)
