"""Steps on their way to the pool, behind the agents' backs.

What always holds: `record` never waits; a step stays here until the pool has answered for it, however often that takes;
what had to be given up is counted and logged. One message is under way at a time. It gathers what comes within some
milliseconds and all that came while the last one was under way, so that under load the messages grow instead of the
queue.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from stepwell.errors import Conflict, PoolUnavailable, StepwellError, UnknownTrajectory
from stepwell.gateway.recording.backlog import MAX_MESSAGE, OutboxQueue
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

MAX_HELD = 20_000
"""Steps kept while the pool is away; beyond it the oldest is given up."""
MAX_HELD_BYTES = 2**30
"""The same in bytes: prompts are long."""
GATHERING = 0.02
"""Seconds a message waits for company, unless someone waits for it. It costs a millisecond, whatever its size."""
RETRY_PAUSE = 1.0
SETTLE_TIMEOUT = 30.0
TOLD_EVERY = 1.0
"""Seconds between two lines about steps given up."""
TAKEN = (SubmitVerdict.ACCEPTED, SubmitVerdict.DUPLICATE, SubmitVerdict.QUARANTINED)
"""The pool has the step."""


class Sealer(Protocol):
    """Knows things of a step that are settled only after it was recorded."""

    async def seal(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The same steps, completed. Asked again if the pool could not be reached."""

    def forget(self, step: Step) -> None:
        """Its fate is known."""


class Outbox:
    def __init__(
        self,
        pool: StepSink,
        on_refused: Callable[[str], None],
        *,
        sealer: Sealer | None = None,
        spool: Spool | None = None,
        max_held: int = MAX_HELD,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """`on_refused` is told the trajectory_uid of a step that the pool has no trajectory for. A sealer has the last
        word on steps before they leave.

        The spool gets a copy of all that is held, so its file has the same bounds. What it still has of an earlier
        process is delivered first.
        """
        self.delivered: Counter[str] = Counter()
        """Steps the pool has, by verdict."""
        self.lost: Counter[str] = Counter()
        """Steps that did not get into the pool, by cause."""
        self._pool = pool
        self._on_refused = on_refused
        self._sealer = sealer
        self._spool = spool
        self._backlog = OutboxQueue(max_held, max_held_bytes)
        self._arrived = asyncio.Event()
        """There is something to take."""
        self._hurried = asyncio.Event()
        """Someone waits: no more gathering."""
        self._settling: dict[str | None, asyncio.Event] = {}
        """By trajectory: set once nothing of it is held. None stands for all."""
        self._awaited: dict[Step, asyncio.Future[SubmitVerdict | None]] = {}
        """Who waits for the verdict on this very step; None means that it was given up."""
        self._resuming = False
        """What was put off is about to be tried again."""
        self._given_up = 0
        self._told_at = -TOLD_EVERY
        if spool is not None:
            self._backlog.add(spool.take_leftovers())
            self._arrived.set()

    @property
    def waiting(self) -> int:
        """Steps the pool has not answered for yet."""
        return self._backlog.steps

    @property
    def waiting_bytes(self) -> int:
        return self._backlog.nbytes

    def record(self, steps: Sequence[Step]) -> None:
        """Take over steps, whatever state the pool is in."""
        self._backlog.add(steps)
        if self._spool is not None:
            self._spool.add(steps)
        self._arrived.set()
        if gone := self._backlog.trim():
            self._give_up(gone)

    async def record_durably(self, steps: Sequence[Step], timeout: float = SETTLE_TIMEOUT) -> None:
        """Take over steps, and return once the pool has them.

        PoolUnavailable if that takes too long: they are kept and delivered later. UnknownTrajectory or Conflict if
        the pool refuses one of them.
        """
        answers = [asyncio.get_running_loop().create_future() for _ in steps]
        self._awaited.update(zip(steps, answers, strict=True))
        self.record(steps)
        self._hurried.set()
        try:
            async with asyncio.timeout(timeout):
                verdicts = [await answer for answer in answers]
        except TimeoutError:
            raise PoolUnavailable(
                f"the pool has not confirmed this call within {timeout:g} s; it is kept and will be delivered"
            ) from None
        finally:
            for step in steps:
                self._awaited.pop(step, None)
        for step, verdict in zip(steps, verdicts, strict=True):
            if verdict not in TAKEN:
                raise _refusal(step, verdict)

    async def settle(self, trajectory_uid: str | None = None, timeout: float = SETTLE_TIMEOUT) -> None:
        """Wait until the pool has answered for all steps of that trajectory, or for all there are."""
        if not self._backlog.held(trajectory_uid):
            return
        settled = self._settling.setdefault(trajectory_uid, asyncio.Event())
        self._hurried.set()
        try:
            async with asyncio.timeout(timeout):
                await settled.wait()
        except TimeoutError:
            waiting = self._backlog.held(trajectory_uid)
            raise PoolUnavailable(f"{waiting} steps still wait for the pool after {timeout:g} s; try again") from None

    async def drain(self, timeout: float) -> None:
        """At the end: wait for all to settle. What has not by then is lost, unless there is a spool to keep it."""
        try:
            await self.settle(timeout=timeout)
        except PoolUnavailable as failure:
            if self._spool is None:
                self.lost["shutdown"] += self.waiting
                log.error("the gateway ends and gives its last steps up: %s", failure)
            else:
                log.warning("the gateway ends; %d steps stay in its spool until it starts again", self.waiting)
        self._tell_given_up(every=0.0)

    async def run(self) -> None:
        """Deliver, until cancelled."""
        while True:
            await self._arrived.wait()
            await self._gather()
            message = self._backlog.take()
            if not self._backlog.queued:
                self._arrived.clear()
            if message and not await self._deliver(message):
                await asyncio.sleep(RETRY_PAUSE)

    async def _gather(self) -> None:
        if self._backlog.queued < MAX_MESSAGE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHERING):
                    await self._hurried.wait()
        self._hurried.clear()

    async def _deliver(self, message: Sequence[Step]) -> bool:
        try:
            sealed = message if self._sealer is None else await self._sealer.seal(message)
            verdicts = await self._pool.submit_steps(sealed)
        except PoolUnavailable as failure:
            log.warning("%d steps are waiting for the pool: %s", self.waiting, failure)
        except Exception:  # whatever it was, the steps of all agents must not end with it
            log.exception("%d steps are waiting, the pool failed", self.waiting)
        else:
            self._note(message, verdicts)
            return True
        self._backlog.give_back(message)
        self._arrived.set()
        return False

    def _note(self, message: Sequence[Step], verdicts: Sequence[SubmitVerdict]) -> None:
        """What became of each step."""
        full: list[Step] = []
        answered: list[Step] = []
        for step, verdict in zip(message, verdicts, strict=True):
            if verdict is SubmitVerdict.FULL:
                full.append(step)
                continue
            answered.append(step)
            self._count(step, verdict)
            self._backlog.settle(step)
            self._tell(step, verdict)
        if full:
            self._put_off(full)
        if self._spool is not None:
            self._spool.remove(answered)
        self._tell_given_up()

    def _count(self, step: Step, verdict: SubmitVerdict) -> None:
        if verdict in TAKEN:
            self.delivered[verdict] += 1
            if verdict is SubmitVerdict.QUARANTINED:
                log.warning("trajectory %s: a step was quarantined: %s", step.trajectory_uid, step.quarantine)
        else:
            self.lost[verdict] += 1
            log.warning("trajectory %s: the pool refused a step as %s", step.trajectory_uid, verdict)
            self._on_refused(step.trajectory_uid)

    def _put_off(self, full: Sequence[Step]) -> None:
        self._backlog.put_off(full)
        if not self._resuming:
            log.warning("%d steps are waiting: the pool is full", self.waiting)
            self._resuming = True
            asyncio.get_running_loop().call_later(RETRY_PAUSE, self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._backlog.resume()
        self._arrived.set()

    def _give_up(self, gone: Sequence[Step]) -> None:
        self.lost["recorder_full"] += len(gone)
        self._given_up += len(gone)
        for step in gone:
            self._tell(step, None)
        if self._spool is not None:
            self._spool.remove(gone)
        self._tell_given_up()

    def _tell(self, step: Step, verdict: SubmitVerdict | None) -> None:
        """Wake whoever waits for this step, its trajectory, or all."""
        if self._sealer is not None:
            self._sealer.forget(step)
        answer = self._awaited.pop(step, None)
        if answer is not None and not answer.done():
            answer.set_result(verdict)
        for waiting_for in (step.trajectory_uid, None):
            if waiting_for in self._settling and not self._backlog.held(waiting_for):
                self._settling.pop(waiting_for).set()

    def _tell_given_up(self, every: float = TOLD_EVERY) -> None:
        now = time.monotonic()
        if self._given_up and now - self._told_at >= every:
            log.error("%d steps were given up, the oldest of those held; %d are waiting", self._given_up, self.waiting)
            self._given_up, self._told_at = 0, now


def _refusal(step: Step, verdict: SubmitVerdict | None) -> StepwellError:
    if verdict is None:
        return PoolUnavailable("this call was given up: too many steps wait for the pool")
    if verdict is SubmitVerdict.UNKNOWN:
        return UnknownTrajectory(f"the pool has no trajectory {step.trajectory_uid} of prompt_uid {step.prompt_uid}")
    return Conflict(f"trajectory {step.trajectory_uid}: the pool refused this call's step as {verdict}")
