"""How many calls may be under way at once: a bound that can be moved while they are. First come, first served."""

import asyncio
from collections import deque
from types import TracebackType


class Slots:
    """`async with slots:` holds one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def load(self) -> float:
        """Calls under way and waiting, as a share of what may be under way."""
        return (self._taken + len(self._waiting)) / self._most

    def resize(self, most: int) -> None:
        """Those under way go on, however many they are."""
        self._most = max(1, most)
        self._admit()

    async def __aenter__(self) -> None:
        if self._taken < self._most and not self._waiting:
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted in the very moment in which it was told to leave
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken < self._most:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._taken += 1
                turn.set_result(None)
