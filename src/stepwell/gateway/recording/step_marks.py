"""Marks of recorded steps on their way to the pool: who read them (see MarkUnseen). They are few.

A mark is sent again until the pool has answered. It may arrive before its step.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.client import PoolClient

log = logging.getLogger("stepwell.gateway")

MAX_WAITING = 10_000
"""Marks that wait for the pool; further ones are lost, and their steps are trained."""


class StepMarks:
    def __init__(self, pool: PoolClient, *, retry_pause: float, max_waiting: int = MAX_WAITING) -> None:
        self.told: Counter[str] = Counter()
        """Steps, by mark."""
        self.lost: Counter[str] = Counter()
        """Steps whose mark did not get into the pool, by cause."""
        self._pool = pool
        self._retry_pause = retry_pause
        self._max_waiting = max_waiting
        self._waiting: dict[asyncio.Task[None], str] = {}
        """The waiting tasks with their trajectory."""

    def add(self, ref: TrajectoryRef, uids: Sequence[str], mark: str) -> None:
        if len(self._waiting) >= self._max_waiting:
            self._lose("full", uids, ref, f"{self._max_waiting} marks wait for the pool")
            return
        task = asyncio.create_task(self._send(ref, uids, mark))
        self._waiting[task] = ref.trajectory_uid
        task.add_done_callback(self._waiting.pop)

    async def settle(self, trajectory_uid: str | None, timeout: float) -> None:
        """Wait until the pool has all marks of that trajectory, or all marks. PoolUnavailable if it takes too long."""
        tasks = [task for task, of in self._waiting.items() if trajectory_uid in (None, of)]
        if tasks and (waiting := (await asyncio.wait(tasks, timeout=timeout))[1]):
            raise PoolUnavailable(
                f"{len(waiting)} marks of steps still wait for the pool after {timeout:g} s; try again"
            )

    async def _send(self, ref: TrajectoryRef, uids: Sequence[str], mark: str) -> None:
        while True:
            try:
                await self._pool.mark_unseen(ref.trajectory_uid, ref.prompt_uid, uids, mark)
            except PoolUnavailable:
                await asyncio.sleep(self._retry_pause)
            except StepwellError as failure:
                return self._lose("refused", uids, ref, str(failure))
            else:
                self.told[mark] += len(uids)
                return None

    def _lose(self, cause: str, uids: Sequence[str], ref: TrajectoryRef, why: str) -> None:
        self.lost[cause] += len(uids)
        log.warning("trajectory %s: who read %d steps is not told to the pool: %s", ref.trajectory_uid, len(uids), why)
