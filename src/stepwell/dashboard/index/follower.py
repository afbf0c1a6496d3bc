"""Keeps the index and the texts up to date with the pool, within a share of the pool's time.

Invariants:
- Following takes at most FOLLOW_SHARE of the pool's time, except for the first reading of everything.
- Reading texts takes at most TEXT_SHARE of the pool's time, and a quarter of this process's time. The newest
  conversations are read first.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.follower import ConversationTexts
from stepwell.dashboard.index import TrajectoryIndex, TrajectoryKey, key_of
from stepwell.errors import StepwellError
from stepwell.pool.api.watching import Cursor, TrajectorySnapshot
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


class CallBudget:
    """Limits the share of the pool's time that calls take. Pure: callers pass the time.

    Over a long time, calls take at most `share` of it. Up to `reserve` seconds are saved for the first reading and for
    bursts. The cost of a call is computed from the fastest of the last calls: a slower one waited for a pool that was
    away, or for a busy machine.
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
        self._credit -= min(self._seconds_per_unit) * amount

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
        self._put(wanted, await asyncio.to_thread(self._decode, columns))
        now = time.monotonic()
        return max(self._budget.pause(now), DECODING_REST * (now - read_at))

    def _decode(self, columns: Columns) -> dict[TrajectoryKey, str]:
        return {key: conversation_text(steps, self._decoder) for key, steps in by_trajectory(columns)}

    def _put(self, wanted: Iterable[TrajectorySnapshot], texts: dict[TrajectoryKey, str]) -> None:
        for snapshot in wanted:
            text = texts.get(key_of(snapshot))
            if text is not None:
                self._texts.put(snapshot, text)


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
