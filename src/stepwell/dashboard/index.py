"""The index of trajectories: 100,000 of them are searched within milliseconds.

Invariants:
- A trajectory has one row, with its last snapshot.
- All trajectories in the pool have a row, and so have the last ones that left it. The row of the one that left first is
  removed first.
- What is filtered, sorted or counted is a column of numbers over all rows, used or not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from stepwell.pool.api.watching import Changes, TrajectorySnapshot, TrajectoryState
from stepwell.steps.step import BoolArray

TrajectoryKey: TypeAlias = tuple[str, str]
"""A trajectory_uid and its prompt_uid."""

GONE = (TrajectoryState.TRAINED, TrajectoryState.DROPPED)
GONE_KEPT = 100_000
FIRST_ROWS = 1024
FACET_VALUES = 100
"""Only the most frequent values of a facet are listed: a source can be anything."""
LABELLED = ("channel", "state", "cause", "source", "exactness")
"""Filters with a few values. They have facets, and so have marks."""
COLUMNS: Mapping[str, type[np.generic]] = {
    "used": np.bool_,
    "added": np.int64,
    **dict.fromkeys(("shard", *LABELLED), np.int32),
    "reward": np.float64,
    "oldest_version": np.float64,
    "newest_version": np.float64,
    "tokens": np.int64,
    "started_at": np.float64,
}
"""The types of the columns; those of labels have codes."""
SORTS: Mapping[str, tuple[str, bool]] = {
    "newest": ("started_at", True),
    "oldest": ("started_at", False),
    "reward": ("reward", False),
    "-reward": ("reward", True),
    "tokens": ("tokens", False),
    "-tokens": ("tokens", True),
}
"""The sort orders by name: the column, and whether the order is descending."""

BLANK = BeforeValidator(lambda value: None if value == "" else value)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    total: int
    """All trajectories in the index."""
    matched: int
    rows: Sequence[TrajectorySnapshot]
    """The wanted page of the matches."""
    facets: Mapping[str, Mapping[str, int]]
    """The matches that each filter would have with another value of it."""


class TrajectoryIndex:
    def __init__(self, gone_kept: int = GONE_KEPT) -> None:
        self._gone_kept = gone_kept
        self._snapshots: list[TrajectorySnapshot | None] = []
        """The snapshots by row."""
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(FIRST_ROWS, kind) for name, kind in COLUMNS.items()}
        """The columns with room for more rows than there are."""
        self._codes: dict[str, dict[str, int]] = {name: {} for name in ("shard", *LABELLED)}
        """The code of each label, by column."""
        self._row_of: dict[TrajectoryKey, int] = {}
        self._free_rows: list[int] = []
        self._gone: dict[TrajectoryKey, None] = {}
        self._by_prompt: dict[str, set[TrajectoryKey]] = {}
        self._by_mark: dict[str, set[int]] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def get(self, key: TrajectoryKey) -> TrajectorySnapshot | None:
        row = self._row_of.get(key)
        return None if row is None else self._snapshots[row]

    def group(self, prompt_uid: str, group: int | None, shard: str | None) -> list[TrajectorySnapshot]:
        """The rollouts of a group in the order in which they were added; without `group`, of the prompt's last one."""
        keys = sorted(self._by_prompt.get(prompt_uid, ()), key=lambda key: self._columns["added"][self._row_of[key]])
        found = [one for key in keys if (one := self.get(key)) is not None and shard in (None, one.shard)]
        wanted = max((one.group for one in found), default=None) if group is None else group
        return [one for one in found if one.group == wanted]

    def oldest_held(self) -> dict[str, float]:
        """The time at which the oldest group in the pool was opened, by channel."""
        held = self._column("used") & ~np.isin(self._column("state"), [self._code("state", state) for state in GONE])
        channels = self._codes["channel"]
        oldest = np.full(len(channels), np.inf)
        np.minimum.at(oldest, self._column("channel")[held], self._column("started_at")[held])
        return {name: at for name, at in zip(channels, oldest.tolist(), strict=True) if at != np.inf}

    # -- changes -------------------------------------------------------------------------------------------------------

    def apply(self, changes: Changes) -> list[TrajectoryKey]:
        """Returns the trajectories that were removed."""
        removed = self._remove_shards(changes.reset_shards)
        for snapshot in changes.snapshots:
            self._put(snapshot)
        while len(self._gone) > self._gone_kept:
            removed.append(next(iter(self._gone)))
            self._remove(removed[-1])
        return [key for key in removed if key not in self._row_of]

    def _remove_shards(self, shards: Iterable[str]) -> list[TrajectoryKey]:
        codes = [self._code("shard", shard) for shard in shards]
        rows = np.flatnonzero(self._column("used") & np.isin(self._column("shard"), codes)) if codes else ()
        removed = [key_of(one) for row in rows if (one := self._snapshots[row]) is not None]
        for key in removed:
            self._remove(key)
        return removed

    def _put(self, snapshot: TrajectorySnapshot) -> None:
        key = key_of(snapshot)
        row = self._row_of.get(key)
        if row is None:
            row = self._new_row(key)
        else:
            self._remove_marks(row)
        self._snapshots[row] = snapshot
        for mark in snapshot.marks:
            self._by_mark.setdefault(mark, set()).add(row)
        for name, codes in self._codes.items():
            self._columns[name][row] = codes.setdefault(str(getattr(snapshot, name)), len(codes))
        for name in ("reward", "oldest_version", "newest_version", "tokens", "started_at"):
            value = getattr(snapshot, name)
            self._columns[name][row] = math.nan if value is None else value
        if snapshot.state in GONE:
            self._gone.setdefault(key)
        else:
            self._gone.pop(key, None)

    def _new_row(self, key: TrajectoryKey) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = len(self._snapshots)
            self._snapshots.append(None)
            if row == len(self._columns["used"]):
                self._columns = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self._columns.items()}
        self._added += 1
        self._columns["used"][row], self._columns["added"][row] = True, self._added
        self._row_of[key] = row
        self._by_prompt.setdefault(key[1], set()).add(key)
        return row

    def _remove(self, key: TrajectoryKey) -> None:
        row = self._row_of.pop(key)
        self._remove_marks(row)
        self._snapshots[row] = None
        self._columns["used"][row] = False
        self._free_rows.append(row)
        self._gone.pop(key, None)
        siblings = self._by_prompt[key[1]]
        siblings.discard(key)
        if not siblings:
            del self._by_prompt[key[1]]

    def _remove_marks(self, row: int) -> None:
        snapshot = self._snapshots[row]
        for mark in snapshot.marks if snapshot is not None else ():
            self._by_mark[mark].discard(row)
            if not self._by_mark[mark]:
                del self._by_mark[mark]

    # -- searching -----------------------------------------------------------------------------------------------------

    def find(self, search: Search, among: Iterable[TrajectoryKey] | None = None) -> SearchResult:
        """One page of the matches; `among` restricts the search to these trajectories."""
        failed_by = self._failed_by_filter(search)
        failed = np.zeros(len(self._snapshots), np.int8)
        for fails in failed_by.values():
            failed += fails
        candidates = self._within_bounds(search) & (failed <= 1)
        if search.prompt_uid is not None:
            candidates &= self._mask(self._row_of[key] for key in self._by_prompt.get(search.prompt_uid, ()))
        if search.uid is not None:
            uids = ((row, self._snapshots[row]) for row in np.flatnonzero(candidates).tolist())
            candidates = self._mask(row for row, one in uids if one is not None and search.uid in one.trajectory_uid)
        if among is not None:
            candidates &= self._mask(row for key in among if (row := self._row_of.get(key)) is not None)
        matched = np.flatnonzero(candidates & (failed == 0))
        page = self._ordered(matched, search.sort)[search.offset : search.offset + search.limit]
        return SearchResult(
            total=len(self),
            matched=len(matched),
            rows=[one for row in page if (one := self._snapshots[row]) is not None],
            facets={
                name: self._facet(name, candidates & (failed - failed_by.get(name, 0) == 0))
                for name in (*LABELLED, "mark")
            },
        )

    def _failed_by_filter(self, search: Search) -> dict[str, BoolArray]:
        """Which rows fail each of the filters that have facets."""
        wanted = {name: getattr(search, name) for name in LABELLED if getattr(search, name) is not None}
        failed_by: dict[str, BoolArray] = {
            name: self._column(name) != self._code(name, value) for name, value in wanted.items()
        }
        if search.mark is not None:
            failed_by["mark"] = ~self._mask(self._by_mark.get(search.mark, ()))
        return failed_by

    def _within_bounds(self, search: Search) -> BoolArray:
        """The used rows within all bounds. A row without the value is within none."""
        rows: BoolArray = self._column("used").copy()
        bounds: tuple[tuple[str, Callable[[Any, float], BoolArray], float | None], ...] = (
            ("reward", np.greater_equal, search.reward_min),
            ("reward", np.less_equal, search.reward_max),
            ("newest_version", np.greater_equal, search.version_min),
            ("oldest_version", np.less_equal, search.version_max),
        )
        for column, holds, bound in bounds:
            if bound is not None:
                rows &= holds(self._column(column), bound)
        return rows

    def _ordered(self, rows: NDArray[np.int64], sort: str) -> NDArray[np.int64]:
        """Rows without the value come last. Equal rows are in the order in which they were added, or its reverse."""
        column, is_descending = SORTS[sort]
        values, added = self._columns[column][rows], self._columns["added"][rows]
        return rows[np.lexsort((-added, -values) if is_descending else (added, values))]

    def _facet(self, name: str, rows: BoolArray) -> dict[str, int]:
        if name == "mark":
            counts = {mark: int(rows[list(marked)].sum()) for mark, marked in self._by_mark.items()}
        else:
            codes = self._codes[name]
            of_codes = np.bincount(self._column(name)[rows], minlength=len(codes)).tolist()
            counts = dict(zip(codes, of_codes, strict=True))
        most_frequent = sorted(counts.items(), key=lambda pair: -pair[1])[:FACET_VALUES]
        return {value: count for value, count in most_frequent if value and count}

    def _column(self, name: str) -> NDArray[Any]:
        return self._columns[name][: len(self._snapshots)]

    def _code(self, name: str, label: str) -> int:
        """The code of a label; -1, which no row has, if it is unknown."""
        return self._codes[name].get(label, -1)

    def _mask(self, rows: Iterable[int]) -> BoolArray:
        mask = np.zeros(len(self._snapshots), np.bool_)
        mask[np.fromiter(rows, np.int64)] = True
        return mask


def key_of(snapshot: TrajectorySnapshot) -> TrajectoryKey:
    return snapshot.trajectory_uid, snapshot.prompt_uid
