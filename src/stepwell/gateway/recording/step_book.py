"""The book of the steps that a gateway holds for the pool: in memory, in one lane for each shard, or on disk only.

- A step is held until `settle`, also while it is in flight. `held` counts those in memory and those on disk.
- The bounds of memory hold for all lanes together. They are kept by `trim`, which takes the oldest steps that are not
  in flight out of their lanes.
- Postponed steps (the pool has no room for them, or refused them with an error) do not delay the others.
- A step of an engine that does not tell which weights wrote each token gets its version while it is held.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineReplica
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.steps.columns import pack
from stepwell.steps.step import JsonObject, Step, VersionSpan
from stepwell.wire.openai import NO_IDS

MAX_MESSAGE = 256
"""Steps in one message."""
MAX_MESSAGE_BYTES = 32 * 2**20
"""Bytes in one message, unless a single step has more."""
STEP_OVERHEAD = 1024
"""About the bytes of a step without its arrays."""
BRACKET = "version_bracket"
"""The key, in a step's extras, of the versions before and after a call during which the weights changed."""
UNKNOWN_WEIGHTS = "version_unknown: a weight sync found that the engine has other weights than the trainer"


def step_bytes(step: Step) -> int:
    """About the bytes of a step: 4 per token, 5 more per response token for log-probability and mask."""
    return STEP_OVERHEAD + 4 * len(step.prompt_ids) + 9 * len(step.response_ids)


@dataclass(slots=True, eq=False)
class HeldStep:
    """One step that the gateway holds, and all that is known of its way."""

    uid: str
    trajectory_uid: str
    step: Step | None
    """None while it is on disk only."""
    nbytes: int = 0
    number: int = 0
    """The place in the order of arrival."""
    is_held: bool = True
    is_on_disk_only: bool = False
    """Whether the step has no place in memory: the spool has it, or is about to."""
    answer: asyncio.Future[SubmitVerdict | None] | None = None
    """The verdict for whoever waits for it; None as a verdict means that the step was given up."""
    refusals: int = 0
    """The number of times that its shard failed over the step while it took other messages."""
    taken_before: int = 0
    """The number of messages that the shard had taken at the last of these."""
    engine: EngineReplica | None = None
    """The engine that wrote it, until it is asked for its version; None if it need not be."""
    row: int = 0
    """The row of the spool's file that has it; 0 if none has. Only the spool's thread uses it."""
    is_late: bool = False
    """The disk did not take it at once, which is counted. Only the spool's thread uses it."""


def engine_to_ask(step: Step, engine: EngineReplica | None) -> EngineReplica | None:
    """The engine, if its version after the call tells more than the step does."""
    tells_more = engine is not None and engine.facts.weight_versions and not step.version_spans
    return engine if tells_more else None


def steps_of(held: Iterable[HeldStep]) -> list[Step]:
    return [one.step for one in held if one.step is not None]


@dataclass(slots=True, eq=False)
class Lane:
    """The steps for one shard that are not in flight, and what is known of the shard."""

    queue: deque[HeldStep] = field(default_factory=deque)
    """The oldest first."""
    postponed: deque[HeldStep] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to take."""
    hurried: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody waits: send without gathering."""
    taken: int = 0
    """Messages that the shard has taken."""
    failed: int = 0
    """Single steps of the present message over which the shard failed, one after the other."""
    is_served: bool = False
    """A task sends its messages."""
    is_resuming: bool = False
    """Postponed steps are about to be tried again."""

    def take(self) -> list[HeldStep]:
        """The oldest steps that fit in a message. They are in flight until they are settled, returned or postponed."""
        message: list[HeldStep] = []
        room = MAX_MESSAGE_BYTES
        while self.queue and len(message) < MAX_MESSAGE:
            room -= self.queue[0].nbytes
            if message and room < 0:
                break
            message.append(self.queue.popleft())
        return message

    def give_back(self, message: Sequence[HeldStep]) -> None:
        """The message did not arrive: its steps are the oldest again."""
        self.queue.extendleft(reversed(message))
        self.arrived.set()

    def resume(self) -> None:
        """Postponed steps may be taken again, after all others."""
        self.is_resuming = False
        self.queue.extend(self.postponed)
        self.postponed.clear()
        self.arrived.set()


class StepBook:
    def __init__(self, max_steps: int, max_bytes: int) -> None:
        """The bounds are those of memory."""
        self.lanes: dict[str, Lane] = {}
        """The lanes by shard."""
        self.unsorted: deque[HeldStep] = deque()
        """Steps whose shard is not known yet."""
        self.steps = 0
        """Steps in memory."""
        self.nbytes = 0
        """Bytes in memory."""
        self.on_disk = 0
        """Steps that are on disk only."""
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._arrived = 0
        self._by_trajectory: dict[str, int] = {}

    def held(self, trajectory_uid: str | None) -> int:
        """The number of steps of that trajectory; None means all."""
        return self.steps + self.on_disk if trajectory_uid is None else self._by_trajectory.get(trajectory_uid, 0)

    def add(self, steps: Sequence[Step], engine: EngineReplica | None = None) -> list[HeldStep]:
        """`engine` has written them."""
        added = []
        for step in steps:
            self._arrived += 1
            held = HeldStep(step.uid, step.trajectory_uid, step, step_bytes(step), self._arrived)
            held.engine = engine_to_ask(step, engine)
            self.nbytes += held.nbytes
            self._by_trajectory[held.trajectory_uid] = self._by_trajectory.get(held.trajectory_uid, 0) + 1
            added.append(held)
        self.steps += len(added)
        self.unsorted.extend(added)
        return added

    def enter(self, held: HeldStep) -> None:
        """Hold a step from now on, in memory or on disk."""
        self._by_trajectory[held.trajectory_uid] = self._by_trajectory.get(held.trajectory_uid, 0) + 1
        if held.step is None:
            held.is_on_disk_only = True
            self.on_disk += 1
        else:
            self._enter_memory(held, held.step)

    def recalled(self, held: HeldStep) -> None:
        """A step that was on disk only is in memory again, unless it was settled meanwhile."""
        if held.is_held and held.step is not None:
            self.on_disk -= 1
            held.is_on_disk_only = False
            self._enter_memory(held, held.step)

    def replace(self, held: HeldStep, step: Step) -> None:
        """Hold another step in the place of this one."""
        self.nbytes += step_bytes(step) - held.nbytes
        held.step, held.nbytes = step, step_bytes(step)

    def settle(self, held: HeldStep) -> bool:
        """The step is no longer held. False if it was not."""
        if not held.is_held:
            return False
        held.is_held = False
        if held.is_on_disk_only:
            self.on_disk -= 1
        else:
            self.steps -= 1
            self.nbytes -= held.nbytes
        left = self._by_trajectory[held.trajectory_uid] - 1
        if left:
            self._by_trajectory[held.trajectory_uid] = left
        else:
            del self._by_trajectory[held.trajectory_uid]
        return True

    def discard(self, steps: Iterable[HeldStep]) -> list[HeldStep]:
        """No longer hold these steps, none of which is in a lane. Returns those that were held."""
        discarded = [held for held in steps if self.settle(held)]
        self.unsorted = deque(held for held in self.unsorted if held.is_held)
        return discarded

    def sort(self, shard_of: Callable[[str], str]) -> set[Lane]:
        """Put new steps into the lanes of their shards, by prompt_uid. Returns these lanes."""
        lanes = set()
        while self.unsorted:
            held = self.unsorted.popleft()
            if held.step is not None:
                shard = shard_of(held.step.prompt_uid)
                if (lane := self.lanes.get(shard)) is None:
                    lane = self.lanes[shard] = Lane()
                lane.queue.append(held)
                lanes.add(lane)
        return lanes

    def trim(self, *, to_disk: bool) -> list[HeldStep]:
        """Take the oldest steps out of memory until the bounds are kept. `to_disk`: they are held on disk from now on;
        otherwise they are settled."""
        trimmed: list[HeldStep] = []
        while (self.steps > self._max_steps or self.nbytes > self._max_bytes) and (oldest := self._oldest()):
            held = oldest.popleft()
            if to_disk:
                held.is_on_disk_only = True
                self.steps -= 1
                self.nbytes -= held.nbytes
                self.on_disk += 1
            else:
                self.settle(held)
            trimmed.append(held)
        return trimmed

    def _enter_memory(self, held: HeldStep, step: Step) -> None:
        self._arrived += 1
        held.number, held.nbytes = self._arrived, step_bytes(step)
        self.steps += 1
        self.nbytes += held.nbytes
        self.unsorted.append(held)

    def _oldest(self) -> deque[HeldStep] | None:
        """The queue whose first step is the oldest that is not in flight."""
        queues = [self.unsorted, *(lane.postponed or lane.queue for lane in self.lanes.values())]
        return min(filter(None, queues), key=lambda queue: queue[0].number, default=None)


def can_be_packed(step: Step) -> bool:
    try:
        pack([step])
    except Exception:  # noqa: BLE001 - a step may hold anything
        return False
    return True


def without_content(step: Step, why: str) -> Step:
    """A step that only keeps its place in its trajectory. Nothing of it can be at fault."""
    return replace(
        step,
        prompt_ids=NO_IDS,
        response_ids=NO_IDS,
        response_logprobs=None,
        response_mask=None,
        version_spans=(),
        metadata={},
        sampling={},
        extras={},
        temperature=None,
        quarantine=why,
    )


async def confirm_versions(engines: EngineFleet, message: Sequence[HeldStep]) -> None:
    """Complete steps with their versions before they are sent: their engine was asked before the call, and is asked
    now. Each engine is asked once for all steps; nobody is asked about a step again.

    - If both answers agree, the version is certain.
    - If they differ, the weights changed during the call: the step keeps the older version, which counts for its
      staleness, and its extras have both.
    - If the engine does not answer, the step keeps the version before the call, without a span: no token is older.
    - If the engine has weights that nobody knows, the step is quarantined.
    """
    asked = tuple({held.engine for held in message if held.engine is not None})
    versions = await asyncio.gather(*map(engines.version_after, asked))
    version_of = {
        engine: UNKNOWN_WEIGHTS if engine.has_unknown_weights else version
        for engine, version in zip(asked, versions, strict=True)
    }
    for held in message:
        if held.engine is not None and held.step is not None:
            held.step, held.engine = _confirmed(held.step, version_of[held.engine]), None


def _confirmed(step: Step, after: int | str | None) -> Step:
    if after is None:
        return step
    if isinstance(after, str):
        return replace(step, quarantine=step.quarantine or after)
    if after == step.policy_version:
        return replace(step, version_spans=(VersionSpan(after, 0, len(step.response_ids)),))
    extras: JsonObject = {**step.extras, BRACKET: [step.policy_version, after]}
    return replace(step, policy_version=min(step.policy_version, after), extras=extras)
