"""Samples that wait for a child, oldest first."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.rewards.attempt import Attempt


@dataclass(slots=True, eq=False)
class Asked:
    message: bytes
    """The sample, pickled."""
    answer: "asyncio.Future[Attempt]"
    """Done already where whoever asked no longer wants to know."""
    sent_at: float = 0.0
    deaths: int = 0
    """How often a child died with it through nobody's fault."""

    def tell(self, attempt: Attempt) -> None:
        if not self.answer.done():
            self.answer.set_result(attempt)


class Backlog:
    def __init__(self) -> None:
        self._waiting: deque[Asked] = deque()
        self._not_empty = asyncio.Event()

    def is_empty(self) -> bool:
        return not self._waiting

    def put(self, asked: Asked) -> None:
        self._waiting.append(asked)
        self._not_empty.set()

    def put_first(self, asked: Iterable[Asked]) -> None:
        """In this order, before all others."""
        self._waiting.extendleft(reversed([*asked]))
        self._not_empty.set()

    async def take(self, count: int) -> list[Asked]:
        """Up to `count`, as soon as there is one."""
        while True:
            await self._not_empty.wait()
            taken: list[Asked] = []
            while self._waiting and len(taken) < count:
                asked = self._waiting.popleft()
                if not asked.answer.done():
                    taken.append(asked)
            if not self._waiting:
                self._not_empty.clear()
            if taken:
                return taken
