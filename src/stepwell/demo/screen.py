"""What the demo prints while it runs: one line for each finished part, and the reward, or the acceptance by users.

In a terminal these are a chart that is redrawn with each update; elsewhere they are a line every few updates, and the
reward is a chart at the end.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from stepwell.pool.api.policy import Canary, PolicyDecision
from stepwell.trainers.reporting import Report, UpdateMetrics

EVERY, EVERY_LIVE = 10, 4
"""Updates per line."""
AGAINST = {"rollback": "rolled back", "refuse": "refused"}
"""The guard's decisions against a version."""

Redraw: TypeAlias = Callable[[Sequence[float], str], None]
"""Draws the values of all updates, and a line below them."""


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
