"""Groups on their way to the pool. A message costs the same whatever its size, so those that come together go together.

What always holds: one message is under way at a time; whoever brought a group is answered after the pool has answered
for it. A message waits for the groups that are being read, and, where many come, for those who were just answered and
will soon be back; a lone environment waits for no one.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepwell.pool.api.ports import DoorPort
from stepwell.pool.rules.ingest import Registration, Verdict
from stepwell.steps.columns import Columns, stack

PATIENCE = 0.01
"""Seconds a message waits for groups that are being read."""
RETURN = 0.004
"""Seconds in which an environment that was just answered may be back with its next group."""
LARGEST_MESSAGE = 2**25
"""Tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    columns: Columns
    registrations: Sequence[Registration]
    answer: asyncio.Future[list[Verdict]]


class Submissions:
    def __init__(self, pool: DoorPort) -> None:
        self._pool = pool
        self._waiting: list[Parcel] = []
        self._sending: asyncio.Task[None] | None = None
        self._arriving = 0
        self._all_here = asyncio.Event()
        """None is being read."""
        self._all_here.set()

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """While a group is being read."""
        self._arriving += 1
        self._all_here.clear()
        try:
            yield
        finally:
            self._arriving -= 1
            if not self._arriving:
                self._all_here.set()

    async def submit(self, columns: Columns, registrations: Sequence[Registration]) -> list[Verdict]:
        """One verdict a step. A caller that is cancelled does not take its groups back."""
        parcel = Parcel(columns, registrations, asyncio.get_running_loop().create_future())
        self._waiting.append(parcel)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return await parcel.answer

    async def _send_all(self) -> None:
        try:
            await self._gather()
            while self._waiting:
                await self._send(self._next_message())
                if self._waiting:
                    await asyncio.sleep(RETURN)
                    await self._gather()
        finally:
            self._sending = None

    async def _gather(self) -> None:
        if self._all_here.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_here.wait(), PATIENCE)

    def _next_message(self) -> list[Parcel]:
        message: list[Parcel] = []
        tokens = 0
        while self._waiting and (not message or tokens + len(self._waiting[0].columns.tokens) <= LARGEST_MESSAGE):
            tokens += len(self._waiting[0].columns.tokens)
            message.append(self._waiting.pop(0))
        return message

    async def _send(self, message: list[Parcel]) -> None:
        registrations = [wanted for parcel in message for wanted in parcel.registrations]
        try:
            verdicts = await self._pool.submit_columns(stack([parcel.columns for parcel in message]), registrations)
        except Exception as failure:  # noqa: BLE001  whatever it is, it is theirs who wait
            for parcel in message:
                _fail(parcel.answer, failure)
            return
        for parcel in message:
            own, verdicts = verdicts[: len(parcel.columns)], verdicts[len(parcel.columns) :]
            if not parcel.answer.done():
                parcel.answer.set_result(own)


def _fail(answer: asyncio.Future[list[Verdict]], failure: Exception) -> None:
    if not answer.done():
        answer.set_exception(failure)
