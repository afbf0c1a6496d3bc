"""Steps on their way to the pool, sent in the background.

- `record` never waits. A step stays here until the pool has answered for it, however many tries that takes.
- Steps that are given up are counted and logged.
- Each shard has a lane: one that is slow or away delays no other.
- One message of a lane is in flight at a time. It has the steps of some milliseconds and all that came while the
  previous message was in flight, so that under load the messages grow instead of the queue.
- A message that fails with an error is divided until the step at fault is alone. If the shard takes others and not
  this one, an empty step takes its place, quarantined with the error. A shard that takes nothing is at fault itself:
  everything waits for it.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from stepwell.errors import Conflict, PoolUnavailable, StepwellError, UnknownTrajectory
from stepwell.gateway.recording.call_book import CallBook, StepMarks
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.step_book import (
    MAX_MESSAGE,
    HeldStep,
    Lane,
    StepBook,
    VersionConfirmer,
    can_be_packed,
    steps_of,
    without_content,
)
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

MAX_HELD = 20_000
"""Steps that are held while the pool is unavailable; beyond it the oldest is given up."""
MAX_HELD_BYTES = 2**30
"""The same in bytes: prompts are long."""
GATHER_SECONDS = 0.05
"""How long a message waits for more steps, unless somebody waits for it. A message costs about a millisecond of CPU
here, and as much in the link to Ray."""
RETRY_PAUSE = 1.0
"""Seconds between two tries."""
SETTLE_TIMEOUT = 30.0
LOG_INTERVAL = 1.0
"""Seconds between two log lines about steps that were given up."""
TAKEN = (SubmitVerdict.ACCEPTED, SubmitVerdict.DUPLICATE, SubmitVerdict.QUARANTINED)
"""The pool has the step."""
MAX_REASON = 500
"""Characters of the reason of a quarantine."""
MOST_REFUSALS = 3
"""How often a shard may fail over a step while it takes others."""
MOST_FAILURES = 8
"""Single steps over which a shard fails one after the other before it counts as the one at fault."""
UNSENDABLE = "unsendable"
"""The kind of quarantine, and of loss, for a step that cannot be packed, or over which its shard fails."""


class Outbox:
    def __init__(
        self,
        pool: PoolClient,
        on_refused: Callable[[str], None],
        *,
        calls: CallBook | None = None,
        confirmer: VersionConfirmer | None = None,
        spool: Spool | None = None,
        max_held: int = MAX_HELD,
        max_held_bytes: int = MAX_HELD_BYTES,
        gather_seconds: float = GATHER_SECONDS,
        retry_pause: float = RETRY_PAUSE,
        confirm_timeout: float = SETTLE_TIMEOUT,
    ) -> None:
        """`on_refused` gets the trajectory_uid of a step that the pool has no trajectory for. `calls` hears what
        becomes of their steps. The confirmer completes steps before they are sent.

        The spool gets a copy of all steps that are held. Steps beyond `max_held` and `max_held_bytes` wait in it alone,
        up to its own bound; without a spool they are given up. The steps that an earlier process left are sent first.
        """
        self.delivered: Counter[str] = Counter()
        """Steps that the pool has, by verdict."""
        self.lost: Counter[str] = Counter()
        """Steps that did not get into the pool, by cause."""
        self.marks = StepMarks(pool, retry_pause=retry_pause)
        self._pool = pool
        self._on_refused = on_refused
        self._calls = calls
        self._confirmer = confirmer
        self._spool = spool
        self._gather_seconds = gather_seconds
        self._retry_pause = retry_pause
        self._confirm_timeout = confirm_timeout
        self._book = StepBook(max_held, max_held_bytes)
        self._arrived = asyncio.Event()
        """Set when there are steps that are in no lane yet."""
        self._is_hurried = False
        """Somebody waits for them."""
        self._settling: dict[str | None, asyncio.Event] = {}
        """The events by trajectory: each is set when no step of it is held. None stands for all trajectories."""
        self._dropped = 0
        self._logged_at = -LOG_INTERVAL
        self._recall_below = max_held // 2, max_held_bytes // 2
        """Steps and bytes in memory below which steps are read back from disk."""
        self._is_recalling = False
        self._leftovers: Sequence[HeldStep] = () if spool is None else spool.take_leftovers()
        """Steps of an earlier process, until it is known that they are for this pool. Some may be on disk only."""
        for held in self._leftovers:
            self._book.enter(held)
        if spool is not None:
            self._arrived.set()
        self._is_claimed = spool is None

    @property
    def waiting(self) -> int:
        """Steps that the pool has not answered for."""
        return self._book.held(None)

    @property
    def waiting_bytes(self) -> int:
        return self._book.nbytes

    def record(self, steps: Sequence[Step]) -> None:
        """Take over steps, whatever state the pool is in."""
        self._record(steps, self._book.add(steps))

    async def record_durably(self, steps: Sequence[Step]) -> None:
        """Take over steps, and return when the pool has them.

        PoolUnavailable if that takes too long: the steps are kept and sent later. UnknownTrajectory or Conflict if the
        pool refuses one of them.
        """
        added, loop = self._book.add(steps), asyncio.get_running_loop()
        answers = [loop.create_future() for _ in added]
        for held, answer in zip(added, answers, strict=True):
            held.answer = answer
        self._record(steps, added)
        self._hurry()
        timeout = self._confirm_timeout
        try:
            async with asyncio.timeout(timeout):
                verdicts = [await answer for answer in answers]
        except TimeoutError:
            raise PoolUnavailable(
                f"the pool has not confirmed this call within {timeout:g} s; it is kept and will be delivered"
            ) from None
        for step, verdict in zip(steps, verdicts, strict=True):
            if verdict not in TAKEN:
                raise refusal_of(step, verdict)

    async def settle(self, trajectory_uid: str | None = None, timeout: float = SETTLE_TIMEOUT) -> None:
        """Wait until the pool has answered for all steps of that trajectory and their marks, or for all steps."""
        if self._book.held(trajectory_uid):
            await self._settle_steps(trajectory_uid, timeout)
        await self.marks.settle(trajectory_uid, timeout)

    async def _settle_steps(self, trajectory_uid: str | None, timeout: float) -> None:
        settled = self._settling.setdefault(trajectory_uid, asyncio.Event())
        self._hurry()
        try:
            async with asyncio.timeout(timeout):
                await settled.wait()
        except TimeoutError:
            waiting = self._book.held(trajectory_uid)
            raise PoolUnavailable(f"{waiting} steps still wait for the pool after {timeout:g} s; try again") from None

    async def scrub(self) -> None:
        """Data is removed for good: send all that is held, and remove what is left of deleted steps from the spool's
        file. PoolUnavailable if that cannot be done now."""
        await self.settle()
        if self._spool is not None:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[bool] = loop.create_future()
            self._spool.scrub(lambda is_clean: loop.call_soon_threadsafe(done.set_result, is_clean))
            if not await done:
                raise PoolUnavailable("the spool cannot be cleaned now")

    async def drain(self, timeout: float) -> None:
        """Waits, at the end, for all steps to settle. The others are lost, unless there is a spool that keeps them."""
        try:
            await self.settle(timeout=timeout)
        except PoolUnavailable as failure:
            if self._spool is None:
                self.lost["shutdown"] += self.waiting
                log.error("the gateway ends and gives up its last steps: %s", failure)
            else:
                log.warning("the gateway ends; %d steps stay in its spool until it starts again", self.waiting)
        self._log_dropped(interval=0.0)

    async def run(self) -> None:
        """Send steps, until cancelled."""
        if self._spool is not None:
            loop = asyncio.get_running_loop()
            self._spool.on_given_up = lambda given_up: loop.call_soon_threadsafe(self._given_up_on_disk, given_up)
        async with asyncio.TaskGroup() as sending:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                try:
                    shard_of = await self._pool.shard_finder()
                    await self._claim_spool()
                except Exception as failure:  # noqa: BLE001 - whatever it is, the steps wait for the pool
                    log.warning("%d steps are waiting for the pool: %s", self.waiting, failure)
                    await asyncio.sleep(self._retry_pause)
                    self._arrived.set()
                    continue
                for lane in self._book.sort(shard_of):
                    if not lane.is_served:
                        lane.is_served = True
                        sending.create_task(self._run_lane(lane))
                    lane.arrived.set()
                    if self._is_hurried:
                        lane.hurried.set()
                self._is_hurried = False

    async def _run_lane(self, lane: Lane) -> None:
        while True:
            await lane.arrived.wait()
            await self._gather(lane)
            message = lane.take()
            if not lane.queue:
                lane.arrived.clear()
            lane.failed = 0
            if message and not await self._send(lane, message):
                await asyncio.sleep(self._retry_pause)

    async def _claim_spool(self) -> None:
        """Claims the spool once, as soon as the pool answers: steps for another pool, which would refuse them, are not
        sent."""
        if self._spool is None or self._is_claimed:
            return
        is_own = self._spool.claim(await self._pool.pool_uid())
        self._is_claimed = True
        if not is_own:
            discarded = self._book.discard(self._leftovers)
            self.lost["other_pool"] += len(discarded)
            for held in discarded:
                self._wake(held.trajectory_uid)
        self._leftovers = ()
        self._recall()

    def _record(self, steps: Sequence[Step], added: Sequence[HeldStep]) -> None:
        if self._calls is not None:
            self._calls.recorded(steps)
        if self._spool is not None:
            self._spool.add(added)
        self._arrived.set()
        if trimmed := self._book.trim(to_disk=self._spool is not None):
            if self._spool is None:
                self._drop(trimmed)
            else:
                self._spool.release(trimmed)

    def _hurry(self) -> None:
        self._is_hurried = bool(self._book.unsorted)
        for lane in self._book.lanes.values():
            lane.hurried.set()

    async def _gather(self, lane: Lane) -> None:
        if len(lane.queue) < MAX_MESSAGE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_seconds):
                    await lane.hurried.wait()
        lane.hurried.clear()

    async def _send(self, lane: Lane, message: Sequence[HeldStep]) -> bool:
        """Whether the lane may go on at once."""
        if lane.failed >= MOST_FAILURES:  # the shard is at fault, not these steps
            lane.give_back(message)
            return False
        steps = steps_of(message)
        try:
            confirmed = steps if self._confirmer is None else await self._confirmer.confirm(steps)
            verdicts = await self._pool.submit_steps(confirmed)
        except PoolUnavailable as failure:
            log.warning("%d steps are waiting for the pool: %s", self.waiting, failure)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the steps of all agents must not be lost with it
            return await self._divide(lane, message, failure)
        else:
            lane.taken += 1
            lane.failed = 0
            self._settle_message(lane, message, verdicts)
            return True
        lane.give_back(message)
        return False

    async def _divide(self, lane: Lane, message: Sequence[HeldStep], failure: Exception) -> bool:
        """Send the halves of a message that failed, each by itself; a single step waits apart from the others."""
        if len(message) > 1:
            half = len(message) // 2
            sent_first = await self._send(lane, message[:half])
            return await self._send(lane, message[half:]) or sent_first
        (held,) = message
        lane.failed += 1
        if not held.refusals:
            log.error("the pool failed over a step of trajectory %s", held.trajectory_uid, exc_info=failure)
        if not held.refusals or lane.taken > held.taken_before:
            held.refusals += 1
        held.taken_before = lane.taken
        if held.refusals >= MOST_REFUSALS or not all(map(can_be_packed, steps_of(message))):
            self._give_up(lane, held, failure)
        else:
            self._postpone(lane, [held])
        return False

    def _give_up(self, lane: Lane, held: HeldStep, failure: Exception) -> None:
        """The first time, an empty step takes its place in the trajectory, and says why."""
        held.refusals = 0
        (step,) = steps_of([held])
        if step.quarantine is not None and step.quarantine.startswith(UNSENDABLE):
            self.lost[UNSENDABLE] += 1
            self._settle(held, None)
            if self._spool is not None:
                self._spool.remove([held])
            return
        why = f"{UNSENDABLE}: {type(failure).__name__}: {failure}"
        self._book.replace(held, without_content(step, why[:MAX_REASON]))
        if self._spool is not None:
            self._spool.remove([held])
            self._spool.add([held])
        lane.give_back([held])

    def _settle_message(self, lane: Lane, message: Sequence[HeldStep], verdicts: Sequence[SubmitVerdict]) -> None:
        refused_as_full: list[HeldStep] = []
        answered: list[HeldStep] = []
        for held, verdict in zip(message, verdicts, strict=True):
            if verdict is SubmitVerdict.FULL:
                refused_as_full.append(held)
                continue
            answered.append(held)
            self._count(held, verdict)
            self._settle(held, verdict)
        if refused_as_full:
            log.warning("%d steps are waiting: the pool is full", self.waiting)
            self._postpone(lane, refused_as_full)
        if self._spool is not None:
            self._spool.remove(answered)
            if SubmitVerdict.DELETED in verdicts:
                self._spool.scrub()
            self._recall()
        self._log_dropped()

    def _recall(self) -> None:
        """Read steps back that are on disk only, if there is room in memory."""
        steps, nbytes = self._recall_below
        has_room = self._book.steps <= steps and self._book.nbytes <= nbytes
        if self._spool is not None and self._book.on_disk and has_room and not self._is_recalling:
            self._is_recalling = True
            loop = asyncio.get_running_loop()
            self._spool.recall(nbytes // 2, lambda found: loop.call_soon_threadsafe(self._recalled, found))

    def _recalled(self, found: Sequence[HeldStep]) -> None:
        self._is_recalling = False
        for held in found:
            self._book.recalled(held)
        self._arrived.set()

    def _given_up_on_disk(self, given_up: Sequence[HeldStep]) -> None:
        settled = [held.trajectory_uid for held in given_up if self._book.settle(held)]
        self.lost["spool_full"] += len(settled)
        self._dropped += len(settled)
        for uid in dict.fromkeys(settled):
            if self._calls is not None:
                self._calls.lost_of(uid)
            self._wake(uid)
        self._log_dropped()

    def _count(self, held: HeldStep, verdict: SubmitVerdict) -> None:
        if verdict in TAKEN:
            self.delivered[verdict] += 1
            if verdict is SubmitVerdict.QUARANTINED:
                reason = held.step.quarantine if held.step is not None else ""
                log.warning("trajectory %s: a step was quarantined: %s", held.trajectory_uid, reason)
        else:
            self.lost[verdict] += 1
            log.warning("trajectory %s: the pool refused a step as %s", held.trajectory_uid, verdict)
            self._on_refused(held.trajectory_uid)

    def _postpone(self, lane: Lane, message: Sequence[HeldStep]) -> None:
        lane.postponed.extend(message)
        if not lane.is_resuming:
            lane.is_resuming = True
            asyncio.get_running_loop().call_later(self._retry_pause, lane.resume)

    def _drop(self, dropped: Sequence[HeldStep]) -> None:
        self.lost["recorder_full"] += len(dropped)
        self._dropped += len(dropped)
        for held in dropped:
            self._notify(held, None)
        self._log_dropped()

    def _settle(self, held: HeldStep, verdict: SubmitVerdict | None) -> None:
        self._book.settle(held)
        self._notify(held, verdict)

    def _notify(self, held: HeldStep, verdict: SubmitVerdict | None) -> None:
        """Wake those who wait for this step, for its trajectory, or for all steps."""
        if self._confirmer is not None and held.step is not None:
            self._confirmer.discard(held.step)
        if self._calls is not None and held.step is not None:
            if verdict in TAKEN:
                self._calls.settled(held.step)
            else:
                self._calls.refused(held.step, is_lost=verdict is None)
        if held.answer is not None and not held.answer.done():
            held.answer.set_result(verdict)
        self._wake(held.trajectory_uid)

    def _wake(self, trajectory_uid: str) -> None:
        for waiting_for in (trajectory_uid, None):
            if waiting_for in self._settling and not self._book.held(waiting_for):
                self._settling.pop(waiting_for).set()

    def _log_dropped(self, interval: float = LOG_INTERVAL) -> None:
        now = time.monotonic()
        if self._dropped and now - self._logged_at >= interval:
            log.error("%d steps were given up, the oldest of those held; %d are waiting", self._dropped, self.waiting)
            self._dropped, self._logged_at = 0, now


def refusal_of(step: Step, verdict: SubmitVerdict | None) -> StepwellError:
    if verdict is None:
        return PoolUnavailable("this call was given up: too many steps wait for the pool")
    if verdict is SubmitVerdict.UNKNOWN:
        return UnknownTrajectory(f"the pool has no trajectory {step.trajectory_uid} of prompt_uid {step.prompt_uid}")
    return Conflict(f"trajectory {step.trajectory_uid}: the pool refused this call's step as {verdict}")
