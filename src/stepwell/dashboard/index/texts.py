"""The conversations as text, to be searched: of the newest trajectories, as many as fit.

What always holds: it takes no more than `max_bytes`, what belongs to each text included; where there is no room, the
oldest go first and none older than those is asked for again. A conversation that has grown is wanted again, and found
by its old text until then.
"""

import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stepwell.dashboard.index.trajectories import Key, key_of
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState

MAX_BYTES = 200 * 2**20
BESIDE = 450
"""Bytes that a text takes besides its own: its key, its places in tables and heaps."""
SLACK = 1_000

Heap: TypeAlias = list[tuple[float, Key]]


@dataclass(frozen=True, slots=True)
class Kept:
    text: str
    """Without the difference of upper and lower case."""
    nbytes: int
    steps: int
    """How many it is the text of."""
    started_at: float


class Texts:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[Key, Kept] = {}
        self._oldest: Heap = []
        """A heap; what it names may be gone, or kept under a newer entry."""
        self._wanted: dict[Key, TrajectorySnapshot] = {}
        self._newest: Heap = []
        """A heap of what is wanted, and of what no longer is."""
        self._floor = -float("inf")
        """What began at that time or before had to go."""
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def waiting(self) -> int:
        return len(self._wanted)

    def tell(self, row: TrajectorySnapshot) -> None:
        """A trajectory is now so: it is wanted if there is more of it than is known here."""
        key = key_of(row)
        known = self._kept.get(key)
        if row.state is TrajectoryState.DROPPED or row.steps == 0 or row.started_at <= self._floor:
            self._wanted.pop(key, None)
        elif known is None or known.steps != row.steps:
            if key not in self._wanted:
                heapq.heappush(self._newest, (-row.started_at, key))
            self._wanted[key] = row
            _prune(self._newest, self._wanted)

    def next(self, count: int, tokens: int) -> list[TrajectorySnapshot]:
        """The newest that are wanted: up to so many, and up to so many tokens, but at least one if there is any."""
        found: list[TrajectorySnapshot] = []
        while self._newest and len(found) < count:
            row = self._wanted.get(self._newest[0][1])
            if row is not None and found and row.tokens > tokens:
                break
            heapq.heappop(self._newest)
            if row is not None and row.started_at > self._floor:
                tokens -= row.tokens
                found.append(row)
            if row is not None:
                del self._wanted[key_of(row)]
        return found

    def put(self, row: TrajectorySnapshot, text: str) -> None:
        key, folded = key_of(row), text.casefold()
        self.forget(key)
        kept = Kept(folded, sys.getsizeof(folded) + BESIDE, row.steps, row.started_at)
        self._kept[key] = kept
        self._nbytes += kept.nbytes
        heapq.heappush(self._oldest, (row.started_at, key))
        while self._nbytes > self._max_bytes:
            self._drop_oldest()
        _prune(self._oldest, self._kept)

    def forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._nbytes -= kept.nbytes

    def leave(self, keys: Sequence[Key]) -> None:
        """They are no longer listed."""
        for key in keys:
            self.forget(key)
            self._wanted.pop(key, None)

    def snapshot(self) -> dict[Key, Kept]:
        """What is kept now, to be searched in a thread. What goes meanwhile stays in memory until that is done."""
        return self._kept.copy()

    def _drop_oldest(self) -> None:
        started_at, key = heapq.heappop(self._oldest)
        if key in self._kept:
            self.forget(key)
            self._floor = max(self._floor, started_at)


def having(kept: Mapping[Key, Kept], text: str) -> list[Key]:
    """Those in which the text stands, whatever its case. Not quick."""
    folded = text.casefold()
    return [key for key, conversation in kept.items() if folded in conversation.text]


def _prune(heap: Heap, live: Mapping[Key, object]) -> None:
    """Once most of what it names is gone, it names each that is left once."""
    if len(heap) > 2 * len(live) + SLACK:
        heap[:] = {entry[1]: entry for entry in heap if entry[1] in live}.values()
        heapq.heapify(heap)
