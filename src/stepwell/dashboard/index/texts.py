"""Texts of conversations for the search: those of the newest trajectories, as many as fit into memory.

Invariants:
- All entries together take at most `max_bytes`.
- If there is no room, the oldest texts are removed, and nothing that started before them is wanted again.
- A conversation that has grown is wanted again. Until then it is found by its old text.
"""

import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stepwell.dashboard.index import TrajectoryKey, key_of
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState

MAX_BYTES = 200 * 2**20
ENTRY_BYTES = 450
"""Bytes of an entry besides its text: its key, its places in tables and heaps."""
SLACK = 1_000

Heap: TypeAlias = list[tuple[float, TrajectoryKey]]


@dataclass(frozen=True, slots=True)
class IndexedText:
    text: str
    """Case-folded."""
    nbytes: int
    steps: int
    """The number of steps in the text."""
    started_at: float


class ConversationTexts:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: dict[TrajectoryKey, IndexedText] = {}
        self._oldest: Heap = []
        """Entries may be outdated: the text was removed, or has a newer entry."""
        self._wanted: dict[TrajectoryKey, TrajectorySnapshot] = {}
        self._newest: Heap = []
        """Wanted trajectories, and some that are not wanted any more."""
        self._floor = -float("inf")
        """Trajectories that started at this time or before were removed for lack of room."""
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def waiting(self) -> int:
        return len(self._wanted)

    def update(self, snapshot: TrajectorySnapshot) -> None:
        """The text is wanted if the trajectory has other steps than the text."""
        key = key_of(snapshot)
        known = self._texts.get(key)
        if snapshot.state is TrajectoryState.DROPPED or snapshot.steps == 0 or snapshot.started_at <= self._floor:
            self._wanted.pop(key, None)
        elif known is None or known.steps != snapshot.steps:
            if key not in self._wanted:
                heapq.heappush(self._newest, (-snapshot.started_at, key))
            self._wanted[key] = snapshot
            _prune(self._newest, self._wanted)

    def take_wanted(self, count: int, tokens: int) -> list[TrajectorySnapshot]:
        """The newest wanted trajectories within both limits, but at least one if there is any."""
        taken: list[TrajectorySnapshot] = []
        while self._newest and len(taken) < count:
            snapshot = self._wanted.get(self._newest[0][1])
            if snapshot is not None and taken and snapshot.tokens > tokens:
                break
            heapq.heappop(self._newest)
            if snapshot is not None and snapshot.started_at > self._floor:
                tokens -= snapshot.tokens
                taken.append(snapshot)
            if snapshot is not None:
                del self._wanted[key_of(snapshot)]
        return taken

    def put(self, snapshot: TrajectorySnapshot, text: str) -> None:
        key, folded = key_of(snapshot), text.casefold()
        self._remove_text(key)
        entry = IndexedText(folded, sys.getsizeof(folded) + ENTRY_BYTES, snapshot.steps, snapshot.started_at)
        self._texts[key] = entry
        self._nbytes += entry.nbytes
        heapq.heappush(self._oldest, (snapshot.started_at, key))
        while self._nbytes > self._max_bytes:
            self._remove_oldest()
        _prune(self._oldest, self._texts)

    def remove(self, keys: Sequence[TrajectoryKey]) -> None:
        for key in keys:
            self._remove_text(key)
            self._wanted.pop(key, None)

    def copy(self) -> dict[TrajectoryKey, IndexedText]:
        """A copy to be searched in a thread. Texts that are removed meanwhile stay in memory until the search ends."""
        return self._texts.copy()

    def _remove_text(self, key: TrajectoryKey) -> None:
        entry = self._texts.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes

    def _remove_oldest(self) -> None:
        started_at, key = heapq.heappop(self._oldest)
        if key in self._texts:
            self._remove_text(key)
            self._floor = max(self._floor, started_at)


def keys_with_text(texts: Mapping[TrajectoryKey, IndexedText], text: str) -> list[TrajectoryKey]:
    """The conversations that contain the text in upper or lower case. Slow."""
    folded = text.casefold()
    return [key for key, entry in texts.items() if folded in entry.text]


def _prune(heap: Heap, live: Mapping[TrajectoryKey, object]) -> None:
    """If most entries are outdated, keep one entry for each live key."""
    if len(heap) > 2 * len(live) + SLACK:
        heap[:] = {entry[1]: entry for entry in heap if entry[1] in live}.values()
        heapq.heapify(heap)
