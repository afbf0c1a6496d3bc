"""Keeps the index and the texts up to date with the pool, within a share of the pool's time.

Invariants:
- Following takes at most FOLLOW_SHARE of the pool's time, except for the first reading of everything.
- Reading texts takes at most TEXT_SHARE of the pool's time, and a quarter of this process's time. The newest
  conversations are read first.
- All entries of texts together take at most `max_bytes`. If there is no room, the oldest texts are removed, and nothing
  that started before them is wanted again.
- A conversation that has grown is wanted again. Until then it is found by its old text.
"""

import asyncio
import heapq
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.index import TrajectoryIndex, TrajectoryKey, key_of
from stepwell.errors import StepwellError
from stepwell.pool.api.watching import Cursor, TrajectorySnapshot, TrajectoryState
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.conversation import shared_length
from stepwell.steps.step import Step

INTERVAL = 1.0
FOLLOW_SHARE = 0.005
FOLLOW_RESERVE = 10.0
"""Seconds: enough to read some hundred thousand trajectories at once."""
CALL_COST = 50
"""The cost of a call besides its trajectories, counted in trajectories."""
TEXT_SHARE = 0.012
"""Includes the transport of the pool's answers; the work itself is about half of it."""
TEXT_RESERVE = 0.05
TEXTS_AT_ONCE = 200
TOKENS_AT_ONCE = 500_000
DECODING_REST = 3.0
"""The pause after decoding, as a multiple of the time that it took."""
CALLS_KEPT = 32
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
    """Texts of conversations for the search: those of the newest trajectories, as many as fit into memory."""

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
            started_at, oldest = heapq.heappop(self._oldest)
            if oldest in self._texts:
                self._remove_text(oldest)
                self._floor = max(self._floor, started_at)
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


def keys_with_text(texts: Mapping[TrajectoryKey, IndexedText], text: str) -> list[TrajectoryKey]:
    """The conversations that contain the text in upper or lower case. Slow."""
    folded = text.casefold()
    return [key for key, entry in texts.items() if folded in entry.text]


def _prune(heap: Heap, live: Mapping[TrajectoryKey, object]) -> None:
    """If most entries are outdated, keep one entry for each live key."""
    if len(heap) > 2 * len(live) + SLACK:
        heap[:] = {entry[1]: entry for entry in heap if entry[1] in live}.values()
        heapq.heapify(heap)


class CallBudget:
    """Limits the share of the pool's time that calls take. Pure: callers pass the time.

    Over a long time, calls take at most `share` of it. Up to `reserve` seconds are saved for the first reading and for
    bursts. The cost of a call is computed from the fastest of the last calls: a slower one waited for a pool that was
    away, or for a busy machine. The first call has no other to compare with, so it costs the reserve at most: else one
    slow call at the start would delay the second one by minutes.
    """

    def __init__(self, share: float, reserve: float) -> None:
        self._share = share
        self._reserve = reserve
        self._credit = reserve
        self._saved_at: float | None = None
        self._seconds_per_unit: deque[float] = deque(maxlen=CALLS_KEPT)

    def spend(self, waited: float, amount: int, now: float) -> None:
        """A call for `amount` units took `waited` seconds."""
        self._save(now)
        self._seconds_per_unit.append(waited / amount)
        cost = min(self._seconds_per_unit) * amount
        self._credit -= cost if len(self._seconds_per_unit) > 1 else min(cost, self._reserve)

    def pause(self, now: float) -> float:
        """Seconds until the next call is allowed."""
        self._save(now)
        return max(0.0, -self._credit / self._share)

    def _save(self, now: float) -> None:
        if self._saved_at is not None:
            self._credit = min(self._reserve, self._credit + self._share * (now - self._saved_at))
        self._saved_at = now


class PoolFollower:
    """Asks the pool for changes about once a second and puts them into the index."""

    def __init__(self, pool: PoolClient, index: TrajectoryIndex, texts: ConversationTexts) -> None:
        self._pool = pool
        self._index = index
        self._texts = texts
        self._cursors: dict[str, Cursor] = {}
        self._budget = CallBudget(FOLLOW_SHARE, FOLLOW_RESERVE)
        self._polling = asyncio.Lock()
        self.error: str | None = None
        """Why the last poll failed, or what it did without."""
        self.behind = True
        """Whether the pool has more changes than were read."""

    async def poll(self) -> float:
        """Returns the seconds until the next poll."""
        async with self._polling:
            started = time.monotonic()
            try:
                changes = await self._pool.changes(self._cursors)
            except StepwellError as failure:
                self.error, self.behind = str(failure), True
                return INTERVAL
            now = time.monotonic()
            self._budget.spend(now - started, CALL_COST + len(changes.snapshots), now)
            self._cursors = dict(changes.cursors)
            self._texts.remove(self._index.apply(changes))
            for snapshot in changes.snapshots:
                self._texts.update(snapshot)
            missing = ", ".join(changes.missing)
            self.error = f"no answer from {missing}; what they hold is shown as it was" if missing else None
            self.behind = changes.more or bool(missing)
            return max(self._budget.pause(now), 0.0 if changes.more else INTERVAL)


class TextIndexer:
    """Reads conversations from the pool for the text search."""

    def __init__(self, pool: PoolClient, texts: ConversationTexts, decoder: TokenDecoder) -> None:
        self._pool = pool
        self._texts = texts
        self._decoder = decoder
        self._budget = CallBudget(TEXT_SHARE, TEXT_RESERVE)

    async def poll(self) -> float:
        """Returns the seconds until the next poll."""
        wanted = [] if self._decoder.why_not() else self._texts.take_wanted(TEXTS_AT_ONCE, TOKENS_AT_ONCE)
        if not wanted:
            return INTERVAL
        started = time.monotonic()
        try:
            columns = await self._pool.read([key_of(snapshot) for snapshot in wanted])
        except StepwellError:
            for snapshot in wanted:
                self._texts.update(snapshot)
            return INTERVAL
        read_at = time.monotonic()
        self._budget.spend(read_at - started, len(wanted), read_at)
        texts = await asyncio.to_thread(self._decode, columns)
        for snapshot in wanted:
            if (text := texts.get(key_of(snapshot))) is not None:
                self._texts.put(snapshot, text)
        now = time.monotonic()
        return max(self._budget.pause(now), DECODING_REST * (now - read_at))

    def _decode(self, columns: Columns) -> dict[TrajectoryKey, str]:
        return {key: conversation_text(steps, self._decoder) for key, steps in by_trajectory(columns)}


def by_trajectory(columns: Columns) -> Iterator[tuple[TrajectoryKey, list[Step]]]:
    for key, steps in groupby(unpack(columns, copy=False), lambda step: (step.trajectory_uid, step.prompt_uid)):
        yield key, list(steps)


def conversation_text(steps: Sequence[Step], decoder: TokenDecoder) -> str:
    """Each part once: of a prompt, only what the previous step did not have."""
    before: Step | None = None
    parts: list[str] = []
    for step in steps:
        new = step.prompt_ids[shared_length(before, step.prompt_ids) :]
        parts.append(decoder.text([*new.tolist(), *step.response_ids.tolist()]))
        before = step
    return "".join(parts)
