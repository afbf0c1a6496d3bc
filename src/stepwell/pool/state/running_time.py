"""How long the pool has run since a moment of the wall clock.

- A mark is made when the wall clock and the pool's seconds begin to differ by more: after the pool was off, or when the
  clock was set. So a clock that is wrong for a while makes nothing old, and neither does time off.
- What arrived before the first mark counts from there.
"""

from collections.abc import Iterable
from typing import TypeAlias

Mark: TypeAlias = tuple[float, float]
"""A moment of the wall clock, and the pool time of it."""
APART = 60.0
"""Seconds by which they may differ until a mark is made."""
MARKS_KEPT = 64


class RunningTime:
    def __init__(self) -> None:
        self.marks: list[Mark] = []
        """In the order in which they were made."""
        self._now: Mark = (0.0, 0.0)

    def advance(self, now: float, pool_time: float) -> None:
        self._now = (now, pool_time)
        if not self.marks or abs((now - self.marks[-1][0]) - (pool_time - self.marks[-1][1])) > APART:
            self.marks = [*self.marks, self._now][-MARKS_KEPT:]

    def since(self, moment: float) -> float:
        """Seconds that the pool has run since then."""
        until = self._now[1]
        for at, pool_time in reversed(self.marks):
            if at <= moment:
                return self._now[1] - min(pool_time + moment - at, until)
            until = pool_time
        return self._now[1] - until

    def trust_clock(self) -> None:
        """The wall clock is right now, and the pool was off when it did not run: that counts as if it had run."""
        now, pool_time = self._now
        self.marks = [(0.0, pool_time - now)]

    def load(self, marks: Iterable[Iterable[float]]) -> None:
        self.marks = [(at, pool_time) for at, pool_time in marks]
