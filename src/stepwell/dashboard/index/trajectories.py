"""The index of trajectories: 100,000 of them are searched within milliseconds.

Invariants:
- A trajectory has one row, with its last snapshot.
- All trajectories in the pool have a row, and so have the last ones that left it. The row of the one that left first is
  removed first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.dashboard.index import LABELLED, ColumnTable, Labels, Search, ordered, within_bounds
from stepwell.pool.api.watching import Changes, TrajectorySnapshot, TrajectoryState
from stepwell.steps.step import BoolArray

TrajectoryKey: TypeAlias = tuple[str, str]
"""A trajectory_uid and its prompt_uid."""

GONE = (TrajectoryState.TRAINED, TrajectoryState.DROPPED)
GONE_KEPT = 100_000
FACET_VALUES = 100
"""Only the most frequent values of a facet are listed: a source can be anything."""
COLUMNS: Mapping[str, type[np.generic]] = {
    "used": np.bool_,
    "added": np.int64,
    "shard": np.int32,
    **dict.fromkeys(LABELLED, np.int32),
    "reward": np.float64,
    "oldest_version": np.float64,
    "newest_version": np.float64,
    "tokens": np.int64,
    "started_at": np.float64,
}


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
        self._row_of: dict[TrajectoryKey, int] = {}
        self._free_rows: list[int] = []
        self._gone: dict[TrajectoryKey, None] = {}
        self._by_prompt: dict[str, set[TrajectoryKey]] = {}
        self._by_mark: dict[str, set[int]] = {}
        self._table = ColumnTable(COLUMNS)
        self._labels = {name: Labels() for name in ("shard", *LABELLED)}
        self._added = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def get(self, key: TrajectoryKey) -> TrajectorySnapshot | None:
        row = self._row_of.get(key)
        return None if row is None else self._snapshots[row]

    def group(self, prompt_uid: str, group: int | None, shard: str | None) -> list[TrajectorySnapshot]:
        """The rollouts of a group in the order in which they were added; without `group`, of the prompt's last one."""
        keys = sorted(self._by_prompt.get(prompt_uid, ()), key=lambda key: self._table["added"][self._row_of[key]])
        found = [one for key in keys if (one := self.get(key)) is not None and shard in (None, one.shard)]
        wanted = max((one.group for one in found), default=None) if group is None else group
        return [one for one in found if one.group == wanted]

    def oldest_held(self) -> dict[str, float]:
        """The time at which the oldest group in the pool was opened, by channel."""
        table, labels = self._table, self._labels
        gone = [labels["state"].known(state) for state in GONE]
        held = table["used"] & ~np.isin(table["state"], gone)
        channels, started = table["channel"][held], table["started_at"][held]
        oldest = np.full(len(labels["channel"].names), np.inf)
        np.minimum.at(oldest, channels, started)
        return {name: at for name, at in zip(labels["channel"].names, oldest.tolist(), strict=True) if at != np.inf}

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
        codes = [self._labels["shard"].known(shard) for shard in shards]
        rows = np.flatnonzero(self._table["used"] & np.isin(self._table["shard"], codes)) if codes else ()
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
        self._table.set(row, self._numbers(snapshot))
        if snapshot.state in GONE:
            self._gone.setdefault(key)
        else:
            self._gone.pop(key, None)

    def _new_row(self, key: TrajectoryKey) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self._table.add_row()
            self._snapshots.append(None)
        self._added += 1
        self._table.set(row, {"used": True, "added": self._added})
        self._row_of[key] = row
        self._by_prompt.setdefault(key[1], set()).add(key)
        return row

    def _remove(self, key: TrajectoryKey) -> None:
        row = self._row_of.pop(key)
        self._remove_marks(row)
        self._snapshots[row] = None
        self._table.set(row, {"used": False})
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

    def _numbers(self, snapshot: TrajectorySnapshot) -> dict[str, float]:
        labels = {name: labels.code(str(getattr(snapshot, name))) for name, labels in self._labels.items()}
        return {
            **labels,
            "reward": _or_nan(snapshot.reward),
            "oldest_version": _or_nan(snapshot.oldest_version),
            "newest_version": _or_nan(snapshot.newest_version),
            "tokens": snapshot.tokens,
            "started_at": snapshot.started_at,
        }

    # -- searching -----------------------------------------------------------------------------------------------------

    def find(self, search: Search, among: Iterable[TrajectoryKey] | None = None) -> SearchResult:
        """One page of the matches; `among` restricts the search to these trajectories."""
        failed, by_filter = self._failed_filters(search)
        candidates = within_bounds(self._table, search) & (failed <= 1)
        candidates = self._with_uids(candidates, search)
        if among is not None:
            candidates &= self._mask(row for key in among if (row := self._row_of.get(key)) is not None)
        matched = np.flatnonzero(candidates & (failed == 0))
        page = ordered(self._table, matched, search.sort)[search.offset : search.offset + search.limit]
        facets = {
            name: self._facet(name, candidates & (failed - by_filter.get(name, 0) == 0)) for name in (*LABELLED, "mark")
        }
        rows = [one for row in page if (one := self._snapshots[row]) is not None]
        return SearchResult(total=len(self), matched=len(matched), rows=rows, facets=facets)

    def _failed_filters(self, search: Search) -> tuple[NDArray[np.int8], dict[str, BoolArray]]:
        """How many filters with a facet each row fails, and for each filter which rows fail it."""
        by_filter: dict[str, BoolArray] = {}
        for name in LABELLED:
            wanted: str | None = getattr(search, name)
            if wanted is not None:
                by_filter[name] = self._table[name] != self._labels[name].known(wanted)
        if search.mark is not None:
            by_filter["mark"] = ~self._mask(self._by_mark.get(search.mark, ()))
        failed = np.zeros(len(self._table), np.int8)
        for fails in by_filter.values():
            failed += fails
        return failed, by_filter

    def _with_uids(self, rows: BoolArray, search: Search) -> BoolArray:
        if search.prompt_uid is not None:
            rows &= self._mask(self._row_of[key] for key in self._by_prompt.get(search.prompt_uid, ()))
        if search.uid is not None:
            return self._mask(row for row in np.flatnonzero(rows).tolist() if self._has_uid(row, search.uid))
        return rows

    def _has_uid(self, row: int, part: str) -> bool:
        snapshot = self._snapshots[row]
        return snapshot is not None and part in snapshot.trajectory_uid

    def _mask(self, rows: Iterable[int]) -> BoolArray:
        mask = np.zeros(len(self._table), np.bool_)
        mask[np.fromiter(rows, np.int64)] = True
        return mask

    def _facet(self, name: str, rows: BoolArray) -> dict[str, int]:
        counts: list[tuple[str, int]]
        if name == "mark":
            counts = [(mark, int(rows[list(marked)].sum())) for mark, marked in self._by_mark.items()]
        else:
            names = self._labels[name].names
            counts = list(zip(names, _count_codes(self._table[name][rows], len(names)), strict=True))
        most_frequent = sorted(counts, key=lambda pair: -pair[1])[:FACET_VALUES]
        return {value: count for value, count in most_frequent if value and count}


def key_of(snapshot: TrajectorySnapshot) -> TrajectoryKey:
    return snapshot.trajectory_uid, snapshot.prompt_uid


def _count_codes(codes: NDArray[Any], names: int) -> list[int]:
    counts: list[int] = np.bincount(codes, minlength=names).tolist()
    return counts


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
