"""Steps on their way to the pool, sent in the background.

- `record` never waits. A step stays here until the pool has answered for it, however many tries that takes.
- Steps that are given up are counted and logged.
- One message is in flight at a time. It has the steps of some milliseconds and all that came while the previous message
  was in flight, so that under load the messages grow instead of the queue.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from stepwell.errors import Conflict, PoolUnavailable, StepwellError, UnknownTrajectory
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.version_confirmer import VersionConfirmer
from stepwell.pool.api.ports import StepSink
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.gateway")

MAX_MESSAGE = 256
"""Steps in one message."""
MAX_MESSAGE_BYTES = 32 * 2**20
"""Bytes in one message, unless a single step has more."""
STEP_OVERHEAD = 1024
"""About the bytes of a step without its arrays."""
MAX_HELD = 20_000
"""Steps that are held while the pool is unavailable; beyond it the oldest is given up."""
MAX_HELD_BYTES = 2**30
"""The same in bytes: prompts are long."""
GATHER_SECONDS = 0.02
"""How long a message waits for more steps, unless somebody waits for it. A message costs about a millisecond."""
RETRY_PAUSE = 1.0
"""Seconds between two tries."""
SETTLE_TIMEOUT = 30.0
LOG_INTERVAL = 1.0
"""Seconds between two log lines about steps that were given up."""
TAKEN = (SubmitVerdict.ACCEPTED, SubmitVerdict.DUPLICATE, SubmitVerdict.QUARANTINED)
"""The pool has the step."""


def step_bytes(step: Step) -> int:
    """About the bytes of a step: 4 per token, 5 more per response token for log-probability and mask."""
    return STEP_OVERHEAD + 4 * len(step.prompt_ids) + 9 * len(step.response_ids)


class OutboxQueue:
    """A bounded queue of steps, counted by trajectory. It knows no clock and no event loop.

    - A step is held from `add` until `settle` or `trim`, also while it is in flight.
    - The bounds are kept by giving up the oldest step that is not in flight.
    - Postponed steps, for which the pool has no room, do not delay the others.
    """

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self.steps = 0
        self.nbytes = 0
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._queue: deque[Step] = deque()
        self._postponed: deque[Step] = deque()
        self._by_trajectory: dict[str, int] = {}

    @property
    def queued(self) -> int:
        """Steps that can be taken now."""
        return len(self._queue)

    def held(self, trajectory_uid: str | None) -> int:
        """Steps of that trajectory; None means all."""
        return self.steps if trajectory_uid is None else self._by_trajectory.get(trajectory_uid, 0)

    def add(self, steps: Sequence[Step]) -> None:
        self._queue.extend(steps)
        self.steps += len(steps)
        for step in steps:
            self.nbytes += step_bytes(step)
            self._by_trajectory[step.trajectory_uid] = self._by_trajectory.get(step.trajectory_uid, 0) + 1

    def take(self) -> list[Step]:
        """The oldest steps that fit in a message. They are in flight until they are settled, returned or postponed."""
        message: list[Step] = []
        room = MAX_MESSAGE_BYTES
        while self._queue and len(message) < MAX_MESSAGE:
            room -= step_bytes(self._queue[0])
            if message and room < 0:
                break
            message.append(self._queue.popleft())
        return message

    def give_back(self, message: Sequence[Step]) -> None:
        """The message did not arrive: its steps are the oldest again."""
        self._queue.extendleft(reversed(message))

    def postpone(self, steps: Sequence[Step]) -> None:
        self._postponed.extend(steps)

    def resume(self) -> None:
        """Postponed steps may be taken again, after all others."""
        self._queue.extend(self._postponed)
        self._postponed.clear()

    def settle(self, step: Step) -> None:
        """The step is no longer held."""
        self.steps -= 1
        self.nbytes -= step_bytes(step)
        left = self._by_trajectory[step.trajectory_uid] - 1
        if left:
            self._by_trajectory[step.trajectory_uid] = left
        else:
            del self._by_trajectory[step.trajectory_uid]

    def trim(self) -> list[Step]:
        """Give up the oldest steps until the bounds are kept. Returns them."""
        dropped: list[Step] = []
        while (self.steps > self._max_steps or self.nbytes > self._max_bytes) and (self._postponed or self._queue):
            step = (self._postponed or self._queue).popleft()
            self.settle(step)
            dropped.append(step)
        return dropped


class Outbox:
    def __init__(
        self,
        pool: StepSink,
        on_refused: Callable[[str], None],
        *,
        confirmer: VersionConfirmer | None = None,
        spool: Spool | None = None,
        max_held: int = MAX_HELD,
        max_held_bytes: int = MAX_HELD_BYTES,
        gather_seconds: float = GATHER_SECONDS,
        retry_pause: float = RETRY_PAUSE,
        confirm_timeout: float = SETTLE_TIMEOUT,
    ) -> None:
        """`on_refused` gets the trajectory_uid of a step that the pool has no trajectory for. The confirmer completes
        steps before they are sent.

        The spool gets a copy of all steps that are held, so its file has the same bounds. The steps that an earlier
        process left in it are sent first.
        """
        self.delivered: Counter[str] = Counter()
        """Steps that the pool has, by verdict."""
        self.lost: Counter[str] = Counter()
        """Steps that did not get into the pool, by cause."""
        self._pool = pool
        self._on_refused = on_refused
        self._confirmer = confirmer
        self._spool = spool
        self._gather_seconds = gather_seconds
        self._retry_pause = retry_pause
        self._confirm_timeout = confirm_timeout
        self._queue = OutboxQueue(max_held, max_held_bytes)
        self._arrived = asyncio.Event()
        """There is something to take."""
        self._hurried = asyncio.Event()
        """Somebody waits: send without gathering."""
        self._settling: dict[str | None, asyncio.Event] = {}
        """By trajectory: set when no step of it is held. None stands for all trajectories."""
        self._awaited: dict[Step, asyncio.Future[SubmitVerdict | None]] = {}
        """Who waits for the verdict on a step; None as a verdict means that the step was given up."""
        self._resuming = False
        """Postponed steps are about to be tried again."""
        self._dropped = 0
        self._logged_at = -LOG_INTERVAL
        if spool is not None:
            self._queue.add(spool.take_leftovers())
            self._arrived.set()

    @property
    def waiting(self) -> int:
        """Steps that the pool has not answered for."""
        return self._queue.steps

    @property
    def waiting_bytes(self) -> int:
        return self._queue.nbytes

    def record(self, steps: Sequence[Step]) -> None:
        """Take over steps, whatever state the pool is in."""
        self._queue.add(steps)
        if self._spool is not None:
            self._spool.add(steps)
        self._arrived.set()
        if dropped := self._queue.trim():
            self._drop(dropped)

    async def record_durably(self, steps: Sequence[Step]) -> None:
        """Take over steps, and return when the pool has them.

        PoolUnavailable if that takes too long: the steps are kept and sent later. UnknownTrajectory or Conflict if the
        pool refuses one of them.
        """
        answers = [asyncio.get_running_loop().create_future() for _ in steps]
        self._awaited.update(zip(steps, answers, strict=True))
        self.record(steps)
        self._hurried.set()
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
                raise _refusal(step, verdict)

    async def settle(self, trajectory_uid: str | None = None, timeout: float = SETTLE_TIMEOUT) -> None:
        """Wait until the pool has answered for all steps of that trajectory, or for all steps."""
        if not self._queue.held(trajectory_uid):
            return
        settled = self._settling.setdefault(trajectory_uid, asyncio.Event())
        self._hurried.set()
        try:
            async with asyncio.timeout(timeout):
                await settled.wait()
        except TimeoutError:
            waiting = self._queue.held(trajectory_uid)
            raise PoolUnavailable(f"{waiting} steps still wait for the pool after {timeout:g} s; try again") from None

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
        while True:
            await self._arrived.wait()
            await self._gather()
            message = self._queue.take()
            if not self._queue.queued:
                self._arrived.clear()
            if message and not await self._send(message):
                await asyncio.sleep(self._retry_pause)

    async def _gather(self) -> None:
        if self._queue.queued < MAX_MESSAGE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_seconds):
                    await self._hurried.wait()
        self._hurried.clear()

    async def _send(self, message: Sequence[Step]) -> bool:
        try:
            confirmed = message if self._confirmer is None else await self._confirmer.confirm(message)
            verdicts = await self._pool.submit_steps(confirmed)
        except PoolUnavailable as failure:
            log.warning("%d steps are waiting for the pool: %s", self.waiting, failure)
        except Exception:  # whatever it is, the steps of all agents must not be lost with it
            log.exception("%d steps are waiting, the pool failed", self.waiting)
        else:
            self._settle_message(message, verdicts)
            return True
        self._queue.give_back(message)
        self._arrived.set()
        return False

    def _settle_message(self, message: Sequence[Step], verdicts: Sequence[SubmitVerdict]) -> None:
        refused_as_full: list[Step] = []
        answered: list[Step] = []
        for step, verdict in zip(message, verdicts, strict=True):
            if verdict is SubmitVerdict.FULL:
                refused_as_full.append(step)
                continue
            answered.append(step)
            self._count(step, verdict)
            self._queue.settle(step)
            self._notify(step, verdict)
        if refused_as_full:
            self._postpone(refused_as_full)
        if self._spool is not None:
            self._spool.remove(answered)
        self._log_dropped()

    def _count(self, step: Step, verdict: SubmitVerdict) -> None:
        if verdict in TAKEN:
            self.delivered[verdict] += 1
            if verdict is SubmitVerdict.QUARANTINED:
                log.warning("trajectory %s: a step was quarantined: %s", step.trajectory_uid, step.quarantine)
        else:
            self.lost[verdict] += 1
            log.warning("trajectory %s: the pool refused a step as %s", step.trajectory_uid, verdict)
            self._on_refused(step.trajectory_uid)

    def _postpone(self, steps: Sequence[Step]) -> None:
        self._queue.postpone(steps)
        if not self._resuming:
            log.warning("%d steps are waiting: the pool is full", self.waiting)
            self._resuming = True
            asyncio.get_running_loop().call_later(self._retry_pause, self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._queue.resume()
        self._arrived.set()

    def _drop(self, dropped: Sequence[Step]) -> None:
        self.lost["recorder_full"] += len(dropped)
        self._dropped += len(dropped)
        for step in dropped:
            self._notify(step, None)
        if self._spool is not None:
            self._spool.remove(dropped)
        self._log_dropped()

    def _notify(self, step: Step, verdict: SubmitVerdict | None) -> None:
        """Wake those who wait for this step, for its trajectory, or for all steps."""
        if self._confirmer is not None:
            self._confirmer.forget(step)
        answer = self._awaited.pop(step, None)
        if answer is not None and not answer.done():
            answer.set_result(verdict)
        for waiting_for in (step.trajectory_uid, None):
            if waiting_for in self._settling and not self._queue.held(waiting_for):
                self._settling.pop(waiting_for).set()

    def _log_dropped(self, interval: float = LOG_INTERVAL) -> None:
        now = time.monotonic()
        if self._dropped and now - self._logged_at >= interval:
            log.error("%d steps were given up, the oldest of those held; %d are waiting", self._dropped, self.waiting)
            self._dropped, self._logged_at = 0, now


def _refusal(step: Step, verdict: SubmitVerdict | None) -> StepwellError:
    if verdict is None:
        return PoolUnavailable("this call was given up: too many steps wait for the pool")
    if verdict is SubmitVerdict.UNKNOWN:
        return UnknownTrajectory(f"the pool has no trajectory {step.trajectory_uid} of prompt_uid {step.prompt_uid}")
    return Conflict(f"trajectory {step.trajectory_uid}: the pool refused this call's step as {verdict}")
