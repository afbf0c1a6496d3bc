"""A curve: what one figure does as one size grows, what it should do, and why."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Figures = Mapping[str, float]

MOST_GROWTH = 1.5
"""Of a flat curve: its value at the largest size, divided by that at `since`."""
MOST_EXPONENT = 1.3
"""Of a linear curve. A curve of the second degree has 2; 0.3 is for noise."""
TAIL = 4
"""The exponent of a curve is measured from this part of its largest size, where fixed costs hide least."""


class Shape(StrEnum):
    FLAT = "flat"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Its figures have the names `AXIS_NAME_at_SIZE`."""

    axis: str
    name: str
    unit: str
    shape: Shape
    """The most that it may do: a linear curve may also be flatter."""
    reason: str
    since: int = 0
    """For a flat curve: the size from which it is compared. 0: the smallest."""

    @property
    def key(self) -> str:
        return f"{self.axis}_{self.name}"

    def at(self, size: int) -> str:
        """The name of the figure."""
        return f"{self.key}_at_{size}"

    def points(self, figures: Figures) -> dict[int, float]:
        start = self.at(0)[:-1]
        found = {int(name.removeprefix(start)): value for name, value in figures.items() if name.startswith(start)}
        return dict(sorted(found.items()))

    @property
    def verdict_name(self) -> str:
        return f"{self.key}_{'growth' if self.shape is Shape.FLAT else 'exponent'}"

    @property
    def bound(self) -> float:
        return MOST_GROWTH if self.shape is Shape.FLAT else MOST_EXPONENT

    def verdict(self, figures: Figures) -> float:
        """The growth of a flat curve, the exponent of a linear one."""
        points = self.points(figures)
        if self.shape is Shape.FLAT:
            return round(_last(points) / points[max(self.since, min(points))], 2)
        return round(tail_exponent(points), 2)

    def said(self, figures: Figures) -> str:
        """The verdict in words."""
        value, points = self.verdict(figures), self.points(figures)
        if self.shape is Shape.FLAT:
            start = max(self.since, min(points))
            return f"{_met(value <= self.bound, 'flat')}: ×{value:g} from {start:,} to {max(points):,}"
        return f"{_met(value <= self.bound, 'linear at most')}: exponent {value:g}"


def tail_exponent(points: Mapping[int, float]) -> float:
    """The slope between the largest size and the largest one that is at most a quarter of it, both on log scales."""
    largest = max(points)
    other = max(size for size in points if size * TAIL <= largest)
    return math.log(points[largest] / points[other]) / math.log(largest / other)


def _last(points: Mapping[int, float]) -> float:
    return points[max(points)]


def _met(is_met: bool, shape: str) -> str:
    return shape if is_met else f"NOT {shape}"
