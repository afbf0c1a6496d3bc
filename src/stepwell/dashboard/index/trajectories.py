"""Every trajectory the pool has told of, searched in milliseconds even when there are a hundred thousand.

What always holds: a trajectory has one row, the last Summary told of it; all that the pool holds is here, and the last
of what has gone, the longest gone out first.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepwell.dashboard.index.search import LABELLED, Search, matching, ordered
from stepwell.dashboard.index.table import Labels, Table
from stepwell.pool.api.watching import Changes, TrajectorySnapshot, TrajectoryState
from stepwell.steps.step import BoolArray

Key: TypeAlias = tuple[str, str]
"""A trajectory_uid and its prompt_uid."""

GONE = (TrajectoryState.TRAINED, TrajectoryState.DROPPED)
GONE_KEPT = 100_000
FACET_VALUES = 100
"""The commonest values of a facet that are told; a source can be anything."""
COLUMNS: Mapping[str, type[np.generic]] = {
    "used": np.bool_,
    "seen": np.int64,
    "shard": np.int32,
    **dict.fromkeys(LABELLED, np.int32),
    "reward": np.float64,
    "oldest_version": np.float64,
    "newest_version": np.float64,
    "tokens": np.int64,
    "started_at": np.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    total: int
    """All there are."""
    matched: int
    rows: Sequence[TrajectorySnapshot]
    """The page of them that was asked for."""
    facets: Mapping[str, Mapping[str, int]]
    """How many would match with another value of one filter, the others staying as they are."""


class Index:
    def __init__(self, gone_kept: int = GONE_KEPT) -> None:
        self._gone_kept = gone_kept
        self._rows: list[TrajectorySnapshot | None] = []
        self._places: dict[Key, int] = {}
        self._free: list[int] = []
        self._gone: dict[Key, None] = {}
        self._prompts: dict[str, set[Key]] = {}
        self._marked: dict[str, set[int]] = {}
        self._table = Table(COLUMNS)
        self._labels = {name: Labels() for name in ("shard", *LABELLED)}
        self._seen = 0

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: Key) -> TrajectorySnapshot | None:
        place = self._places.get(key)
        return None if place is None else self._rows[place]

    def group(self, prompt_uid: str, group: int | None, shard: str | None) -> list[TrajectorySnapshot]:
        """The rollouts of one group, in the order they were first told of; of the prompt's last group if none is
        named."""
        keys = sorted(self._prompts.get(prompt_uid, ()), key=lambda key: self._table["seen"][self._places[key]])
        rows = [row for key in keys if (row := self.get(key)) is not None and shard in (None, row.shard)]
        wanted = max((row.group for row in rows), default=None) if group is None else group
        return [row for row in rows if row.group == wanted]

    def oldest_held(self) -> dict[str, float]:
        """By channel, when its oldest group that is still held was opened."""
        table, labels = self._table, self._labels
        gone = [labels["state"].known(state) for state in GONE]
        held = table["used"] & ~np.isin(table["state"], gone)
        channels, started = table["channel"][held], table["started_at"][held]
        found = np.full(len(labels["channel"].names), np.inf)
        np.minimum.at(found, channels, started)
        return {name: at for name, at in zip(labels["channel"].names, found.tolist(), strict=True) if at != np.inf}

    # -- what the pool tells -------------------------------------------------------------------------------------------

    def apply(self, changes: Changes) -> list[Key]:
        """Take in what has changed; gives those that are no longer listed."""
        left = self._leave_shards(changes.reset_shards)
        for summary in changes.snapshots:
            self._put(summary)
        while len(self._gone) > self._gone_kept:
            left.append(next(iter(self._gone)))
            self._remove(left[-1])
        return [key for key in left if key not in self._places]

    def _leave_shards(self, shards: Iterable[str]) -> list[Key]:
        codes = [self._labels["shard"].known(shard) for shard in shards]
        places = np.flatnonzero(self._table["used"] & np.isin(self._table["shard"], codes)) if codes else ()
        left = [key_of(row) for place in places if (row := self._rows[place]) is not None]
        for key in left:
            self._remove(key)
        return left

    def _put(self, row: TrajectorySnapshot) -> None:
        key = key_of(row)
        place = self._places.get(key)
        if place is None:
            place = self._take_place(key)
        else:
            self._unmark(place)
        self._rows[place] = row
        for mark in row.marks:
            self._marked.setdefault(mark, set()).add(place)
        self._table.put(place, self._numbers(row))
        if row.state in GONE:
            self._gone.setdefault(key)
        else:
            self._gone.pop(key, None)

    def _take_place(self, key: Key) -> int:
        if self._free:
            place = self._free.pop()
        else:
            place = self._table.add()
            self._rows.append(None)
        self._seen += 1
        self._table.put(place, {"used": True, "seen": self._seen})
        self._places[key] = place
        self._prompts.setdefault(key[1], set()).add(key)
        return place

    def _remove(self, key: Key) -> None:
        place = self._places.pop(key)
        self._unmark(place)
        self._rows[place] = None
        self._table.put(place, {"used": False})
        self._free.append(place)
        self._gone.pop(key, None)
        siblings = self._prompts[key[1]]
        siblings.discard(key)
        if not siblings:
            del self._prompts[key[1]]

    def _unmark(self, place: int) -> None:
        row = self._rows[place]
        for mark in row.marks if row is not None else ():
            self._marked[mark].discard(place)
            if not self._marked[mark]:
                del self._marked[mark]

    def _numbers(self, row: TrajectorySnapshot) -> dict[str, float]:
        labels = {name: labels.code(str(getattr(row, name))) for name, labels in self._labels.items()}
        return {
            **labels,
            "reward": _or_nan(row.reward),
            "oldest_version": _or_nan(row.oldest_version),
            "newest_version": _or_nan(row.newest_version),
            "tokens": row.tokens,
            "started_at": row.started_at,
        }

    # -- what is asked -------------------------------------------------------------------------------------------------

    def find(self, search: Search, among: Iterable[Key] | None = None) -> Found:
        """One page of what matches; `among` those trajectories, if they are given."""
        failed, by_filter = self._failed(search)
        close = matching(self._table, search) & (failed <= 1)
        close = self._named(close, search)
        if among is not None:
            close &= self._at(place for key in among if (place := self._places.get(key)) is not None)
        matched = np.flatnonzero(close & (failed == 0))
        page = ordered(self._table, matched, search.sort)[search.offset : search.offset + search.limit]
        facets = {
            name: self._facet(name, close & (failed - by_filter.get(name, 0) == 0)) for name in (*LABELLED, "mark")
        }
        rows = [row for place in page if (row := self._rows[place]) is not None]
        return Found(total=len(self), matched=len(matched), rows=rows, facets=facets)

    def _failed(self, search: Search) -> tuple[NDArray[np.int8], dict[str, BoolArray]]:
        """How many of the filters with a facet each row fails, and which it does."""
        by_filter: dict[str, BoolArray] = {}
        for name in LABELLED:
            wanted: str | None = getattr(search, name)
            if wanted is not None:
                by_filter[name] = self._table[name] != self._labels[name].known(wanted)
        if search.mark is not None:
            by_filter["mark"] = ~self._at(self._marked.get(search.mark, ()))
        failed = np.zeros(len(self._table), np.int8)
        for fails in by_filter.values():
            failed += fails
        return failed, by_filter

    def _named(self, rows: BoolArray, search: Search) -> BoolArray:
        if search.prompt_uid is not None:
            rows &= self._at(self._places[key] for key in self._prompts.get(search.prompt_uid, ()))
        if search.uid is not None:
            part = search.uid
            return self._read(rows, lambda key: part in key[0])
        return rows

    def _read(self, rows: BoolArray, contains: Callable[[Key], bool]) -> BoolArray:
        found = (self._rows[place] for place in np.flatnonzero(rows))
        return self._at(self._places[key_of(row)] for row in found if row is not None and contains(key_of(row)))

    def _at(self, places: Iterable[int]) -> BoolArray:
        mask = np.zeros(len(self._table), np.bool_)
        mask[np.fromiter(places, np.int64)] = True
        return mask

    def _facet(self, name: str, rows: BoolArray) -> dict[str, int]:
        counts: list[tuple[str, int]]
        if name == "mark":
            counts = [(mark, int(rows[list(places)].sum())) for mark, places in self._marked.items()]
        else:
            names = self._labels[name].names
            counts = list(zip(names, _counted(self._table[name][rows], len(names)), strict=True))
        commonest = sorted(counts, key=lambda pair: -pair[1])[:FACET_VALUES]
        return {value: count for value, count in commonest if value and count}


def key_of(row: TrajectorySnapshot) -> Key:
    return row.trajectory_uid, row.prompt_uid


def _counted(codes: NDArray[Any], names: int) -> list[int]:
    counts: list[int] = np.bincount(codes, minlength=names).tolist()
    return counts


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
