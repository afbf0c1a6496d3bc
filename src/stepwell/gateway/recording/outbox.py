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

from stepwell.errors import PoolUnavailable
from stepwell.gateway.call_book import CallBook
from stepwell.gateway.recording.outbox_lane import (
    MAX_REASON,
    MOST_FAILURES,
    MOST_REFUSALS,
    UNSENDABLE,
    LaneSender,
    can_be_packed,
    refusal_of,
    without_content,
)
from stepwell.gateway.recording.outbox_queue import MAX_MESSAGE, OutboxQueue
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.step_marks import StepMarks
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
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
        self._queue = OutboxQueue(max_held, max_held_bytes)
        self._lanes: dict[str, LaneSender] = {}
        """By shard."""
        self._arrived = asyncio.Event()
        """There are steps that are in no lane yet."""
        self._is_hurried = False
        """Somebody waits for them."""
        self._settling: dict[str | None, asyncio.Event] = {}
        """By trajectory: set when no step of it is held. None stands for all trajectories."""
        self._awaited: dict[Step, asyncio.Future[SubmitVerdict | None]] = {}
        """Who waits for the verdict on a step; None as a verdict means that the step was given up."""
        self._dropped = 0
        self._logged_at = -LOG_INTERVAL
        self._recall_below = max_held // 2, max_held_bytes // 2
        """Steps and bytes in memory below which steps are read back from disk."""
        self._on_disk: Counter[str] = Counter()
        """Steps that are in the spool alone, by trajectory."""
        self._is_recalling = False
        self._leftovers: Sequence[Step] = ()
        """Steps of an earlier process, until it is known that they are for this pool. Some may be on disk only."""
        self._left_on_disk: Counter[str] = Counter()
        if spool is not None:
            self._leftovers, self._left_on_disk = spool.take_leftovers(), spool.found_on_disk
            self._queue.add(self._leftovers)
            self._on_disk += self._left_on_disk
            self._arrived.set()
        self._is_claimed = spool is None

    @property
    def waiting(self) -> int:
        """Steps that the pool has not answered for."""
        return self._held(None)

    @property
    def waiting_bytes(self) -> int:
        return self._queue.nbytes

    def record(self, steps: Sequence[Step]) -> None:
        """Take over steps, whatever state the pool is in."""
        if self._calls is not None:
            self._calls.recorded(steps)
        self._queue.add(steps)
        if self._spool is not None:
            self._spool.add(steps)
        self._arrived.set()
        if trimmed := self._queue.trim():
            if self._spool is None:
                self._drop(trimmed)
            else:
                self._on_disk.update(step.trajectory_uid for step in trimmed)
                self._spool.release(trimmed)

    async def record_durably(self, steps: Sequence[Step]) -> None:
        """Take over steps, and return when the pool has them.

        PoolUnavailable if that takes too long: the steps are kept and sent later. UnknownTrajectory or Conflict if the
        pool refuses one of them.
        """
        answers = [asyncio.get_running_loop().create_future() for _ in steps]
        self._awaited.update(zip(steps, answers, strict=True))
        self.record(steps)
        self._hurry()
        timeout = self._confirm_timeout
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
                raise refusal_of(step, verdict)

    async def settle(self, trajectory_uid: str | None = None, timeout: float = SETTLE_TIMEOUT) -> None:
        """Wait until the pool has answered for all steps of that trajectory and their marks, or for all steps."""
        if self._held(trajectory_uid):
            await self._settle_steps(trajectory_uid, timeout)
        await self.marks.settle(trajectory_uid, timeout)

    async def _settle_steps(self, trajectory_uid: str | None, timeout: float) -> None:
        settled = self._settling.setdefault(trajectory_uid, asyncio.Event())
        self._hurry()
        try:
            async with asyncio.timeout(timeout):
                await settled.wait()
        except TimeoutError:
            waiting = self._held(trajectory_uid)
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
        """At the end: wait for all steps to settle. The others are lost, unless there is a spool that keeps them."""
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
            self._spool.on_given_up = lambda uids: loop.call_soon_threadsafe(self._given_up_on_disk, uids)
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
                for lane in self._queue.sort(shard_of):
                    if lane not in self._lanes:
                        self._lanes[lane] = LaneSender()
                        sending.create_task(self._run_lane(lane, self._lanes[lane]))
                    self._lanes[lane].arrived.set()
                    if self._is_hurried:
                        self._lanes[lane].hurried.set()
                self._is_hurried = False

    async def _run_lane(self, lane: str, sender: LaneSender) -> None:
        while True:
            await sender.arrived.wait()
            await self._gather(lane, sender)
            message = self._queue.take(lane)
            if not self._queue.queued(lane):
                sender.arrived.clear()
            sender.failed = 0
            if message and not await self._send(lane, sender, message):
                await asyncio.sleep(self._retry_pause)

    async def _claim_spool(self) -> None:
        """Once, as soon as the pool answers: steps for another pool, which would refuse them, are not sent."""
        if self._spool is None or self._is_claimed:
            return
        is_own = self._spool.claim(await self._pool.pool_uid())
        self._is_claimed = True
        if not is_own:
            apart = self._queue.discard(self._leftovers)
            left = Counter(step.trajectory_uid for step in self._leftovers) + self._left_on_disk
            self.lost["other_pool"] += left.total()
            self._on_disk -= left - Counter(step.trajectory_uid for step in apart)
            for uid in left:
                self._wake(uid)
        self._leftovers = ()
        self._recall()

    def _hurry(self) -> None:
        self._is_hurried = self._queue.has_unsorted
        for sender in self._lanes.values():
            sender.hurried.set()

    async def _gather(self, lane: str, sender: LaneSender) -> None:
        if self._queue.queued(lane) < MAX_MESSAGE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_seconds):
                    await sender.hurried.wait()
        sender.hurried.clear()

    async def _send(self, lane: str, sender: LaneSender, message: Sequence[Step]) -> bool:
        """Whether the lane may go on at once."""
        if sender.failed >= MOST_FAILURES:  # the shard is at fault, not these steps
            self._queue.give_back(lane, message)
            sender.arrived.set()
            return False
        try:
            confirmed = message if self._confirmer is None else await self._confirmer.confirm(message)
            verdicts = await self._pool.submit_steps(confirmed)
        except PoolUnavailable as failure:
            log.warning("%d steps are waiting for the pool: %s", self.waiting, failure)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the steps of all agents must not be lost with it
            return await self._divide(lane, sender, message, failure)
        else:
            sender.taken += 1
            sender.failed = 0
            self._settle_message(lane, sender, message, verdicts)
            return True
        self._queue.give_back(lane, message)
        sender.arrived.set()
        return False

    async def _divide(self, lane: str, sender: LaneSender, message: Sequence[Step], failure: Exception) -> bool:
        """Send the halves of a message that failed, each by itself; a single step waits apart from the others."""
        if len(message) > 1:
            half = len(message) // 2
            sent_first = await self._send(lane, sender, message[:half])
            return await self._send(lane, sender, message[half:]) or sent_first
        (step,) = message
        refusals, taken = sender.refusals.get(step, (0, sender.taken))
        if not refusals:
            log.error("the pool failed over a step of trajectory %s", step.trajectory_uid, exc_info=failure)
        sender.failed += 1
        sender.refusals[step] = refusals + (not refusals or sender.taken > taken), sender.taken
        if sender.refusals[step][0] >= MOST_REFUSALS or not can_be_packed(step):
            self._give_up(lane, sender, step, failure)
        else:
            self._postpone(lane, sender, [step])
        return False

    def _give_up(self, lane: str, sender: LaneSender, step: Step, failure: Exception) -> None:
        """The first time, an empty step takes its place in the trajectory, and says why."""
        del sender.refusals[step]
        if step.quarantine is not None and step.quarantine.startswith(UNSENDABLE):
            self.lost[UNSENDABLE] += 1
            self._queue.settle(step)
            self._notify(step, None)
            if self._spool is not None:
                self._spool.remove([step])
            return
        stub = without_content(step, f"{UNSENDABLE}: {type(failure).__name__}: {failure}"[:MAX_REASON])
        self._queue.replace(step, stub)
        if self._spool is not None:
            self._spool.remove([step])
            self._spool.add([stub])
        if step in self._awaited:
            self._awaited[stub] = self._awaited.pop(step)
        self._queue.give_back(lane, [stub])
        sender.arrived.set()

    def _settle_message(
        self, lane: str, sender: LaneSender, message: Sequence[Step], verdicts: Sequence[SubmitVerdict]
    ) -> None:
        refused_as_full: list[Step] = []
        answered: list[Step] = []
        for step, verdict in zip(message, verdicts, strict=True):
            if verdict is SubmitVerdict.FULL:
                refused_as_full.append(step)
                continue
            answered.append(step)
            self._count(step, verdict)
            sender.refusals.pop(step, None)
            self._queue.settle(step)
            self._notify(step, verdict)
        if refused_as_full:
            log.warning("%d steps are waiting: the pool is full", self.waiting)
            self._postpone(lane, sender, refused_as_full)
        if self._spool is not None:
            self._spool.remove(answered)
            if SubmitVerdict.DELETED in verdicts:
                self._spool.scrub()
            self._recall()
        self._log_dropped()

    def _recall(self) -> None:
        """Read steps back that are on disk only, if there is room in memory."""
        steps, nbytes = self._recall_below
        has_room = self._queue.steps <= steps and self._queue.nbytes <= nbytes
        if self._spool is not None and self._on_disk and has_room and not self._is_recalling:
            self._is_recalling = True
            loop = asyncio.get_running_loop()
            self._spool.recall(nbytes // 2, lambda found: loop.call_soon_threadsafe(self._recalled, found))

    def _recalled(self, steps: Sequence[Step]) -> None:
        self._is_recalling = False
        self._on_disk -= Counter(step.trajectory_uid for step in steps)
        self._queue.add(steps)
        self._arrived.set()

    def _given_up_on_disk(self, trajectory_uids: Sequence[str]) -> None:
        self.lost["spool_full"] += len(trajectory_uids)
        self._dropped += len(trajectory_uids)
        self._on_disk -= Counter(trajectory_uids)
        for uid in dict.fromkeys(trajectory_uids):
            if self._calls is not None:
                self._calls.lost_of(uid)
            self._wake(uid)
        self._log_dropped()

    def _held(self, trajectory_uid: str | None) -> int:
        on_disk = self._on_disk.total() if trajectory_uid is None else self._on_disk[trajectory_uid]
        return self._queue.held(trajectory_uid) + on_disk

    def _count(self, step: Step, verdict: SubmitVerdict) -> None:
        if verdict in TAKEN:
            self.delivered[verdict] += 1
            if verdict is SubmitVerdict.QUARANTINED:
                log.warning("trajectory %s: a step was quarantined: %s", step.trajectory_uid, step.quarantine)
        else:
            self.lost[verdict] += 1
            log.warning("trajectory %s: the pool refused a step as %s", step.trajectory_uid, verdict)
            self._on_refused(step.trajectory_uid)

    def _postpone(self, lane: str, sender: LaneSender, steps: Sequence[Step]) -> None:
        self._queue.postpone(lane, steps)
        if not sender.is_resuming:
            sender.is_resuming = True
            asyncio.get_running_loop().call_later(self._retry_pause, self._resume, lane, sender)

    def _resume(self, lane: str, sender: LaneSender) -> None:
        sender.is_resuming = False
        self._queue.resume(lane)
        sender.arrived.set()

    def _drop(self, dropped: Sequence[Step]) -> None:
        self.lost["recorder_full"] += len(dropped)
        self._dropped += len(dropped)
        for step in dropped:
            self._notify(step, None)
        self._log_dropped()

    def _notify(self, step: Step, verdict: SubmitVerdict | None) -> None:
        """Wake those who wait for this step, for its trajectory, or for all steps."""
        if self._confirmer is not None:
            self._confirmer.discard(step)
        if self._calls is not None:
            if verdict in TAKEN:
                self._calls.settled(step)
            else:
                self._calls.refused(step, is_lost=verdict is None)
        answer = self._awaited.pop(step, None)
        if answer is not None and not answer.done():
            answer.set_result(verdict)
        self._wake(step.trajectory_uid)

    def _wake(self, trajectory_uid: str) -> None:
        for waiting_for in (trajectory_uid, None):
            if waiting_for in self._settling and not self._held(waiting_for):
                self._settling.pop(waiting_for).set()

    def _log_dropped(self, interval: float = LOG_INTERVAL) -> None:
        now = time.monotonic()
        if self._dropped and now - self._logged_at >= interval:
            log.error("%d steps were given up, the oldest of those held; %d are waiting", self._dropped, self.waiting)
            self._dropped, self._logged_at = 0, now
