"""Following the pool: what has changed there is asked for about once a second, and put into the index.

What always holds: however much changes, the pool spends no more than SHARE of its time on this, the first reading of
everything aside.
"""

import asyncio
import time

from stepwell.dashboard.index.budget import Budget
from stepwell.dashboard.index.texts import Texts
from stepwell.dashboard.index.trajectories import Index
from stepwell.errors import StepwellError
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.watching import Cursor

INTERVAL = 1.0
SHARE = 0.005
RESERVE = 10.0
"""Seconds saved up: enough to read some hundred thousand trajectories at once."""
A_CALL = 50
"""What a call costs besides, in trajectories."""


class Following:
    def __init__(self, pool: PoolReader, index: Index, texts: Texts) -> None:
        self._pool = pool
        self._index = index
        self._texts = texts
        self._cursors: dict[str, Cursor] = {}
        self._budget = Budget(SHARE, RESERVE)
        self._one_at_a_time = asyncio.Lock()
        self.error: str | None = None
        """Why the pool could not be followed when it was last tried."""
        self.behind = True
        """There is more to read than has been read."""

    async def look(self) -> float:
        async with self._one_at_a_time:
            begun = time.monotonic()
            try:
                changes = await self._pool.changes(self._cursors)
            except StepwellError as failure:
                self.error, self.behind = str(failure), True
                return INTERVAL
            now = time.monotonic()
            self._budget.spend(now - begun, A_CALL + len(changes.snapshots), now)
            self._cursors = dict(changes.cursors)
            self._texts.leave(self._index.apply(changes))
            for summary in changes.snapshots:
                self._texts.tell(summary)
            self.error, self.behind = None, changes.more
            return max(self._budget.rest(now), 0.0 if changes.more else INTERVAL)
