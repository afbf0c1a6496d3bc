"""Samples that wait for a child, and how many of them a child gets in advance."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.pool.api.scoring import Attempt

LOOKAHEAD = 0.005
"""Seconds of fast calls that a child gets in advance."""
MOST_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class QueuedSample:
    message: bytes
    """The pickled sample."""
    attempt: "asyncio.Future[Attempt]"
    """Already done if the caller was cancelled."""
    sent_at: float = 0.0
    deaths: int = 0
    """How often a child died while it held the sample and no call was running."""

    def finish(self, attempt: Attempt) -> None:
        if not self.attempt.done():
            self.attempt.set_result(attempt)


class SampleQueue:
    """Oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedSample] = deque()
        self._not_empty = asyncio.Event()

    def is_empty(self) -> bool:
        return not self._waiting

    def put(self, sample: QueuedSample) -> None:
        self._waiting.append(sample)
        self._not_empty.set()

    def put_first(self, samples: Iterable[QueuedSample]) -> None:
        """Puts the samples in this order, before all others."""
        self._waiting.extendleft(reversed([*samples]))
        self._not_empty.set()

    async def take(self, count: int) -> list[QueuedSample]:
        """Up to `count` samples, as soon as there is one. Samples whose caller was cancelled are dropped."""
        while True:
            await self._not_empty.wait()
            taken: list[QueuedSample] = []
            while self._waiting and len(taken) < count:
                sample = self._waiting.popleft()
                if not sample.attempt.done():
                    taken.append(sample)
            if not self._waiting:
                self._not_empty.clear()
            if taken:
                return taken


class Prefetch:
    """How many samples a child may hold. All children of a function share it, so a new child starts with what was
    learnt."""

    def __init__(self, concurrent_calls: int | None = None) -> None:
        """An async function has a fixed number; for a plain one (None), the number grows with its speed."""
        self.size = concurrent_calls or 1
        self.is_async = concurrent_calls is not None

    @property
    def is_fast(self) -> bool:
        """Whether the calls of a plain function are so short that a child holds several samples."""
        return not self.is_async and self.size > 1

    def learn(self, seconds: float) -> None:
        """Learns from the duration of a call. One call says little (its process may have waited for a CPU): the number
        at most doubles or halves."""
        if not self.is_async:
            wanted = int(LOOKAHEAD / max(seconds, 1e-6))
            self.size = max(1, self.size // 2, min(self.size * 2, MOST_AT_ONCE, wanted))
