"""Steps on their way to the pool, behind the agents' backs.

What always holds: `record` never waits; a step stays here until the pool has answered for it, however often that takes;
what had to be given up is counted and logged. One message is under way at a time and gathers all that came meanwhile,
so that under load the messages grow instead of the queue.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from stepwell.core.intake import Verdict
from stepwell.core.ports import PoolPort
from stepwell.core.step import Step
from stepwell.errors import PoolUnavailable

log = logging.getLogger("stepwell.gateway")

MAX_MESSAGE = 256
"""Steps in one message."""
MAX_HELD = 20_000
"""Steps kept while the pool is away; beyond it the oldest is given up."""
RETRY_PAUSE = 1.0
SETTLE_TIMEOUT = 30.0


class Recorder:
    def __init__(self, pool: PoolPort, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is told the trajectory_uid of a step that the pool has no trajectory for."""
        self.lost: Counter[str] = Counter()
        """Steps that did not get into the pool, by cause."""
        self._pool = pool
        self._on_refused = on_refused
        self._held: deque[Step] = deque()
        self._changed = asyncio.Condition()
        self._recorded = 0
        self._settled = 0

    async def record(self, steps: Sequence[Step]) -> None:
        """Take over steps. Returns at once."""
        self._held.extend(steps)
        self._recorded += len(steps)
        while len(self._held) > MAX_HELD:
            self._give_up(self._held.popleft())
        await self._tell()

    async def settle(self, timeout: float = SETTLE_TIMEOUT) -> None:
        """Wait until the pool has answered for all that was recorded up to now."""
        goal = self._recorded
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: self._settled >= goal)
        except TimeoutError:
            waiting = self._recorded - self._settled
            raise PoolUnavailable(f"{waiting} steps still wait for the pool after {timeout:g} s; try again") from None

    async def drain(self, timeout: float) -> None:
        """At the end: wait for all to settle, and count as lost what has not by then."""
        try:
            await self.settle(timeout)
        except PoolUnavailable as failure:
            self.lost["shutdown"] += self._recorded - self._settled
            log.error("the gateway ends and gives its last steps up: %s", failure)

    async def run(self) -> None:
        """Deliver, until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._held))
            message = [self._held.popleft() for _ in range(min(len(self._held), MAX_MESSAGE))]
            refused = self._note(message, await self._deliver(message))
            await self._tell()
            if refused:
                self._held.extend(refused)
                await asyncio.sleep(RETRY_PAUSE)

    async def _deliver(self, message: Sequence[Step]) -> list[Verdict]:
        while True:
            try:
                return await self._pool.submit_steps(message)
            except PoolUnavailable as failure:
                log.warning("%d steps are waiting for the pool: %s", len(message) + len(self._held), failure)
                await asyncio.sleep(RETRY_PAUSE)

    def _note(self, message: Sequence[Step], verdicts: Sequence[Verdict]) -> list[Step]:
        """Count what became of each; gives those the pool has no room for yet."""
        full = [step for step, verdict in zip(message, verdicts, strict=True) if verdict is Verdict.FULL]
        if full:
            log.warning("%d steps are waiting: the pool is full", len(full) + len(self._held))
        self._settled += len(message) - len(full)
        for step, verdict in zip(message, verdicts, strict=True):
            if verdict is Verdict.QUARANTINED:
                log.warning("trajectory %s: a step was quarantined: %s", step.trajectory_uid, step.quarantine)
            elif verdict not in (Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.FULL):
                self.lost[verdict] += 1
                log.warning("trajectory %s: the pool refused a step as %s", step.trajectory_uid, verdict)
                self._on_refused(step.trajectory_uid)
        return full

    def _give_up(self, step: Step) -> None:
        self._settled += 1
        self.lost["recorder_full"] += 1
        log.error("trajectory %s: a step was given up, %d are waiting", step.trajectory_uid, MAX_HELD)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
