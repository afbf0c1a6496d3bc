"""What can be looked for among trajectories, and in which order it comes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.dashboard.index.table import Table
from stepwell.steps.step import BoolArray

LABELLED = ("channel", "state", "cause", "source", "exactness")
"""Filters by one of a few values; like the marks, they have facets."""

SORTS: Mapping[str, tuple[str, bool]] = {
    "newest": ("started_at", True),
    "oldest": ("started_at", False),
    "reward": ("reward", False),
    "-reward": ("reward", True),
    "tokens": ("tokens", False),
    "-tokens": ("tokens", True),
}
"""By name: the column, and whether the greatest comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Filters, all of which must hold, and the page that is wanted of what they leave."""

    channel: str | None = None
    state: str | None = None
    cause: str | None = None
    source: str | None = None
    exactness: str | None = None
    mark: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    version_min: int | None = None
    """With tokens of that policy version or a later one."""
    version_max: int | None = None
    prompt_uid: str | None = None
    uid: str | None = None
    """A part of the trajectory_uid."""
    sort: str = "newest"
    offset: int = 0
    limit: int = 100


def matching(table: Table, search: Search) -> BoolArray:
    """The rows within the ranges. A row without the value is within none."""
    rows: BoolArray = table["used"].copy()
    bounds: tuple[tuple[str, Callable[[Any, float], BoolArray], float | None], ...] = (
        ("reward", np.greater_equal, search.reward_min),
        ("reward", np.less_equal, search.reward_max),
        ("newest_version", np.greater_equal, search.version_min),
        ("oldest_version", np.less_equal, search.version_max),
    )
    for column, holds, bound in bounds:
        if bound is not None:
            rows &= holds(table[column], bound)
    return rows


def ordered(table: Table, places: NDArray[np.int64], sort: str) -> NDArray[np.int64]:
    """Those without the value come last; equal ones in the order in which they were told of, or its reverse."""
    column, descending = SORTS[sort]
    values, seen = table[column][places], table["seen"][places]
    return places[np.lexsort((-seen, -values) if descending else (seen, values))]
