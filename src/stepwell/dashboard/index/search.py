"""Search over trajectories: filters, order, and the columns that they are computed on."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from stepwell.steps.step import BoolArray

LABELLED = ("channel", "state", "cause", "source", "exactness")
"""Filters with a few values. They have facets, and so have marks."""

SORTS: Mapping[str, tuple[str, bool]] = {
    "newest": ("started_at", True),
    "oldest": ("started_at", False),
    "reward": ("reward", False),
    "-reward": ("reward", True),
    "tokens": ("tokens", False),
    "-tokens": ("tokens", True),
}
"""The sort orders by name: the column, and whether the order is descending."""
FIRST_ROWS = 1024


def _blank_is_none(value: object) -> object:
    return None if value == "" else value


BLANK = BeforeValidator(_blank_is_none)
Text = Annotated[Annotated[str, Field(max_length=1_000)] | None, BLANK]
Number = Annotated[FiniteFloat | None, BLANK]
Version = Annotated[int | None, BLANK]


class Search(BaseModel):
    """Filters, which must all match, and the wanted page of the result; read from a request. Blank is absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    channel: Text = None
    state: Text = None
    cause: Text = None
    source: Text = None
    exactness: Text = None
    mark: Text = None
    reward_min: Number = None
    reward_max: Number = None
    version_min: Version = None
    """Only trajectories with a token of this policy version or a newer one."""
    version_max: Version = None
    """Only trajectories with a token of this policy version or an older one."""
    prompt_uid: Text = None
    uid: Text = None
    """A part of the trajectory_uid."""
    text: Text = None
    """A part of the conversation, in upper or lower case."""
    sort: Literal["newest", "oldest", "reward", "-reward", "tokens", "-tokens"] = "newest"
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=100, ge=1, le=1_000)


class ColumnTable:
    """Columns of numbers that grow. A column is read as an array over all rows, used or not."""

    def __init__(self, types: Mapping[str, type[np.generic]]) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(FIRST_ROWS, kind) for name, kind in types.items()}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add_row(self) -> int:
        row = self._size
        self._size += 1
        if self._size > len(next(iter(self._columns.values()))):
            self._columns = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self._columns.items()}
        return row

    def set(self, row: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._columns[name][row] = value

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self._size]


class Labels:
    """Small numbers for strings, to be stored in a column."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.names)
            self.names.append(name)
        return code

    def known(self, name: str) -> int:
        """The code of a name; -1, which no row has, if it is unknown."""
        return self._codes.get(name, -1)


def within_bounds(table: ColumnTable, search: Search) -> BoolArray:
    """The used rows within all bounds. A row without the value is within none."""
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


def ordered(table: ColumnTable, rows: NDArray[np.int64], sort: str) -> NDArray[np.int64]:
    """Rows without the value come last. Equal rows are in the order in which they were added, or its reverse."""
    column, is_descending = SORTS[sort]
    values, added = table[column][rows], table["added"][rows]
    return rows[np.lexsort((-added, -values) if is_descending else (added, values))]
