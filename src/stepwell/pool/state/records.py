"""Trajectories, the groups they form, and the leases under which consumers have them. Only PoolState changes them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, cast

from stepwell.pool.api.producing import ENDED_BY
from stepwell.pool.api.sessions import user_of
from stepwell.pool.api.watching import BY_A_PERSON, MARKS
from stepwell.pool.state.stored_step import StoredStep, TrajectoryPacker
from stepwell.steps.prefix_tree import PrefixTree
from stepwell.steps.step import INDEX_BY_POOL, Json, JsonObject
from stepwell.steps.trainable import StepFilter

SLACK = 1.0
"""Seconds that a message may be on its way, or by which the clocks of two machines may differ."""
EXPLANATION, STEP_DETAILS = "reward", "step_details"
"""In a trajectory's metadata: what explains its reward, and in it the evidence of its steps' rewards by identity."""
STEP_ORDER = attrgetter("step_index", "started_at", "number")
OUTCOME = ""
A_GROUP, A_TRAJECTORY, A_STEP, A_PACKED_STEP = 700, 700, 900, 60
"""Bytes of memory that each takes besides the data of its steps. tests/unit/pool/shard/test_counted_bytes.py measures
them."""
A_FIELD, A_VALUE = 40, 45
"""Bytes that a field of a JSON object and a value take besides the text of the name and of the value."""
ADDED_BY_POOL = (EXPLANATION, MARKS, ENDED_BY)
"""What rewards, people and completions add to the metadata, within bounds of their own."""
WORTH_PACKING = 4_096
"""Bytes of data of a step. A complete trajectory of smaller steps is packed; for longer ones the rest hardly counts."""


def json_bytes(fields: JsonObject) -> int:
    """About the memory that JSON fields take; the same for equal fields. What the pool itself adds does not count."""
    counted = {name: value for name, value in fields.items() if name not in ADDED_BY_POOL}
    waiting: list[Json] = [counted] if counted else []
    total = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            total += A_VALUE + len(value) * (1 if value.isascii() else 4)
        elif isinstance(value, dict):
            total += A_VALUE + sum(A_FIELD + len(name) for name in value)
            waiting += value.values()
        elif isinstance(value, list):
            total += A_VALUE + 8 * len(value)
            waiting += value
        else:
            total += A_VALUE
    return total


class KeptReward(NamedTuple):
    identity: str
    """That of its step, or OUTCOME."""
    value: float
    source: str
    notes: str


class Mark(NamedTuple):
    name: str
    """One of RANKS in pool/state/call_operations.py."""
    own_reason: str | None
    """Why the step itself is untrainable."""


class LostCall(NamedTuple):
    gateway: str
    uid: str
    """Empty if it is only known that there may be one."""


class AskedCall(NamedTuple):
    began_at: float
    uid: str
    replaces_all: bool
    """Whatever was asked with its key before."""


@dataclass(slots=True, eq=False)
class OpenCalls:
    """The calls of one trajectory, only in memory: after a restart of the shard, gateways report their calls again."""

    gateways: dict[str, str] = field(default_factory=dict)
    """By uid of an open call."""
    asked: defaultdict[str, list[AskedCall]] = field(default_factory=lambda: defaultdict(list))
    """By key: all calls, ended ones too, in the order in which they began."""

    def is_replaced(self, uid: str) -> bool:
        """Whether its agent has asked again since it was given this answer last."""
        for calls in self.asked.values():
            at = max((place for place, asked in enumerate(calls) if asked.uid == uid), default=len(calls))
            if any(later.replaces_all for later in calls[at + 1 :]):
                return True
        return False

    def is_asked_again(self, uid: str) -> bool:
        return any(uid == asked.uid for calls in self.asked.values() for asked in calls[:-1])


@dataclass(slots=True, eq=False)
class Trajectory:
    uid: str
    group: "Group"
    metadata: JsonObject
    number: int
    """Order of registration in the pool."""
    _steps: dict[str, StoredStep] | bytes = field(default_factory=dict, init=False)
    """Bytes if it is packed."""
    nbytes: int = A_TRAJECTORY
    """Bytes of memory that the trajectory takes, as `held_bytes` computes them."""
    _tokens: PrefixTree | TrajectoryPacker = field(default_factory=PrefixTree, init=False)
    """If it is packed: who unpacks it."""
    completed: bool = False
    completed_at: float = 0.0
    """When it was completed first. From then on it is closed to its agent."""
    completed_time: float = 0.0
    """The same in pool time."""
    reward: float | None = None
    """The outcome reward: that of the whole trajectory, apart from its steps' own. Its revision counts how often it was
    given."""
    reward_source: str = ""
    reward_revision: int = 0
    late_rewards: int = 0
    """Number of rewards that came after it was handed out."""
    reward_lease: str | None = None
    """Why it is not offered to reward workers though it lacks a reward: a reward lease, `resting` or `given up`."""
    failures: int = 0
    """Number of failed attempts to score it."""
    judged: tuple[int, bool] = (0, False)
    """Its extent when reward workers that judge by step last judged it."""
    awaits_steps: bool = False
    """Do reward workers that judge by step still owe a judgement of it?"""
    gateways: tuple[str, ...] = ()
    """The gateways that may hold steps of it."""
    calls: OpenCalls | None = None
    lost_calls: tuple[LostCall, ...] = ()
    """Calls whose steps are missing for good, as it seems."""
    rejected: str | None = None
    """Who rejected it while a trainer had it, and why. It is dropped when it returns."""
    kept_rewards: tuple[KeptReward, ...] = ()
    """Feedback that came while a trainer had it, or the step. It counts when that returns."""
    marks: dict[str, Mark] = field(default_factory=dict)
    """What is known of who read its steps, by their uids. A mark may come before its step."""
    position: int = 0
    """The position of its last change in the change log."""
    changed_at: float = 0.0

    @property
    def steps(self) -> dict[str, StoredStep]:
        """By identity. Quarantined steps are included, without tokens, so that they keep their place in the order."""
        if isinstance(self._steps, bytes):
            self._unpack()
        return self._steps  # type: ignore[return-value]

    @property
    def tokens(self) -> PrefixTree:
        if isinstance(self._steps, bytes):
            self._unpack()
        return self._tokens  # type: ignore[return-value]

    @tokens.setter
    def tokens(self, tree: PrefixTree) -> None:
        self._tokens = tree

    @property
    def is_packed(self) -> bool:
        return isinstance(self._steps, bytes)

    def pack(self, packer: TrajectoryPacker) -> None:
        """Keep its steps in one piece of memory until they are used again. Nobody may have a reference to one of them:
        a change of it would be lost."""
        if not isinstance(self._steps, bytes):
            self._steps, self._tokens = packer.pack(self._steps, self.tokens), packer

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """For readers, who change nothing: if it is packed now, it is so afterwards, and need not be packed anew."""
        packed, packer = self._steps, self._tokens
        yield
        if isinstance(packed, bytes) and isinstance(packer, TrajectoryPacker) and not self.is_packed:
            self._steps, self._tokens = packed, packer
            if packer.awake[-1] == self.uid:
                packer.awake.pop()

    def _unpack(self) -> None:
        packed, packer = self._steps, self._tokens
        assert isinstance(packed, bytes)
        assert isinstance(packer, TrajectoryPacker)
        self._steps, self._tokens = packer.unpack(packed)
        packer.awake.append(self.uid)

    @property
    def key(self) -> tuple[int, int, int, str]:
        """Its place in queues: the group's age first."""
        return self.group.age, self.group.seq, self.number, self.uid

    @property
    def user(self) -> str:
        """The user whose session it is; empty if there is none."""
        return user_of(self.metadata)

    @property
    def is_at_home(self) -> bool:
        """Is it neither under lease nor trained? Then it can still change."""
        return self.group.lease is None and not self.group.trained

    @property
    def born(self) -> float:
        """When its first call began; when its group was opened, if that is not known."""
        return min(
            (step.started_at for step in self.steps.values() if step.started_at > 0), default=self.group.opened_at
        )

    @property
    def step_count(self) -> int:
        return len(self.steps)

    @property
    def revision(self) -> int:
        """The number of the last reward given to it or to one of its steps."""
        last = self.reward_revision
        for step in self.steps.values():
            if step.reward_revision > last:
                last = step.reward_revision
        return last + self.late_rewards

    def can_follow(self, step_index: int) -> bool:
        """Either the producer sets the index of all steps of a trajectory, or the pool does."""
        for first in self.steps.values():
            return (first.step_index == INDEX_BY_POOL) == (step_index == INDEX_BY_POOL)
        return True

    def is_closed_to(self, started_at: float, age: float | None, pool_time: float, grace: float) -> bool:
        """Does a step come too late that arrives now, of a call that began so many seconds ago? A call that was in
        flight at the completion has some grace. Without an age, the sender's clock counts. A negative age says that
        the sender's clock was set back, and nothing of the call."""
        seconds = pool_time - self.completed_time
        is_begun_later = started_at > self.completed_at + SLACK if age is None else 0.0 <= age < seconds - SLACK
        return self.completed and (seconds > grace or is_begun_later)

    def held_steps(self) -> list[StoredStep]:
        return [step for step in self.steps.values() if step.is_held()]

    def held_bytes(self) -> int:
        """What it takes of the memory: the data of its steps, its metadata, and what Python needs for its records."""
        count, data = self._size()
        is_small = self.completed and data < WORTH_PACKING * count
        return A_TRAJECTORY + json_bytes(self.metadata) + data + count * (A_PACKED_STEP if is_small else A_STEP)

    @property
    def is_small(self) -> bool:
        """Is it worth packing? Only what does not grow any more is."""
        count, data = self._size()
        return self.completed and data < WORTH_PACKING * count

    def _size(self) -> tuple[int, int]:
        """How many steps it has, and the bytes of their data."""
        steps = self.steps
        return len(steps), sum([step.nbytes for step in steps.values()])

    def is_scored(self) -> bool:
        return self.reward is not None or any(self.scored_steps())

    def scored_steps(self) -> Iterator[StoredStep]:
        """The steps with a reward of their own, shipped ones included."""
        return (step for step in self.steps.values() if step.reward is not None and step.quarantine is None)

    def set_reward(self, value: float, source: str) -> None:
        """A judgement that a reward worker still owes comes too late from now on."""
        self.reward, self.reward_source = value, source
        self.reward_revision += 1
        self.reward_lease = None

    @property
    def is_relabelled(self) -> bool:
        """Did a person give its reward? Then only a person may change it."""
        return self.reward_source.startswith(BY_A_PERSON)

    @property
    def step_details(self) -> Mapping[str, Mapping[str, str]]:
        """By the steps' identities: the evidence of their rewards, or why they got none."""
        match self.metadata.get(EXPLANATION):
            case {"step_details": dict(details)}:
                return cast("dict[str, dict[str, str]]", {n: d for n, d in details.items() if isinstance(d, dict)})
        return {}

    def explain_step(self, step: StoredStep, details: Mapping[str, str] | None) -> bool:
        """Keep the step's details in place of earlier ones; None removes those. Returns whether anything changed."""
        known = self.step_details
        if not details and step.identity not in known:
            return False
        others: dict[str, Json] = {name: dict(found) for name, found in known.items() if name != step.identity}
        whole = self.metadata.get(EXPLANATION)
        explanation: dict[str, Json] = dict(whole) if isinstance(whole, dict) else {}
        explanation[STEP_DETAILS] = {**others, step.identity: dict(details)} if details else others
        self.metadata = {**self.metadata, EXPLANATION: explanation}
        return True

    def total_return(self) -> float | None:
        """Its outcome reward and the rewards of all its sound steps; None if there is no reward."""
        rewards = [step.reward for step in self.steps.values() if step.reward is not None and step.quarantine is None]
        if not rewards:
            return self.reward
        return math.fsum(rewards if self.reward is None else (*rewards, self.reward))

    @property
    def extent(self) -> tuple[int, bool]:
        """Its sound steps, and whether it is complete: what a worker that judges by step can know of it."""
        return sum(step.quarantine is None for step in self.steps.values()), self.completed

    def has_its_rewards(self) -> bool:
        return self.is_scored() and not self.awaits_steps

    def has_steps_due(self) -> bool:
        """Has it grown since it was judged by step, and may a step of it now get a reward? The last step of an open one
        cannot: nothing is known yet of what comes after it."""
        extent = sound_steps, completed = self.extent
        if extent == self.judged or self.is_relabelled or (sound_steps < 2 and not completed):
            return False
        return any(self.unsettled_steps())

    def unsettled_steps(self) -> Iterator[StoredStep]:
        """The held steps with neither a reward nor a reason why they get none."""
        known = self.step_details
        steps = self.steps.values()
        return (step for step in steps if step.is_held() and step.reward is None and step.identity not in known)

    def lacks_reward(self) -> bool:
        """Is it complete and unscored, with at least one step to score?"""
        return self.completed and not self.is_scored() and any(step.is_held() for step in self.steps.values())

    def last_answer(self) -> StoredStep | None:
        """Its last sound step, if possible one that is trained: a harness's side call is no answer to the user."""
        sound = [step for _, step in self.in_order() if step.quarantine is None]
        return next((step for step in reversed(sound) if step.untrainable is None), sound[-1] if sound else None)

    def in_order(self) -> list[tuple[int, StoredStep]]:
        """All steps with their step_index. Steps that are not shipped count too."""
        ordered = list(self.steps.values())
        if len(ordered) > 1:
            ordered.sort(key=STEP_ORDER)
        return [(n if step.step_index == INDEX_BY_POOL else step.step_index, step) for n, step in enumerate(ordered)]


@dataclass(slots=True, eq=False)
class Group:
    """Rollouts of one prompt that are trained together. It is ready when `size` of them are complete."""

    seq: int
    """Its unique number in the pool."""
    age: int
    """Order of opening; smaller is older. A trajectory that is split off keeps the age of its group."""
    prompt_uid: str
    channel: str
    size: int
    opened_at: float
    deadline: float | None = None
    """In pool time."""
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    nbytes: int = A_GROUP
    """Its own, and those of its trajectories."""
    attempts: int = 0
    """How often it was handed out and came back."""
    lease: str | None = None
    trained: bool = False
    """Acknowledged, and kept as history."""
    source: str = ""
    """Where its rollouts come from: an environment's name; empty for agents."""
    given_up: int = 0
    """Places it once had and no longer waits for: their rollouts were rejected or split off, for example."""
    producer: str = ""
    """Whose it is when the channel is full; empty if it is nobody's. See queues.py."""
    key: tuple[int, int] = field(init=False)
    """Its place in queues: age and number. Made once, because every index of the group has it."""

    def __post_init__(self) -> None:
        self.key = self.age, self.seq

    @property
    def user(self) -> str:
        """That of its first trajectory. Sessions are groups of one."""
        return next((trajectory.user for trajectory in self.trajectories.values()), "")

    @property
    def completed(self) -> int:
        return sum([trajectory.completed for trajectory in self.trajectories.values()])

    def is_of(self, size: int | None) -> bool:
        """Does it fit a producer that names this size, or none?"""
        return size is None or size == self.size or size == self.size + self.given_up

    def give_up(self, places: int) -> None:
        """Wait for that many rollouts less."""
        self.size -= places
        self.given_up += places

    def can_join(self) -> bool:
        return len(self.trajectories) < self.size

    def is_ready(self, *, require_reward: bool) -> bool:
        if len(self.trajectories) < self.size:
            return False
        for trajectory in self.trajectories.values():
            if not trajectory.completed or (require_reward and not trajectory.has_its_rewards()):
                return False
        return True

    def is_uniform(self) -> bool:
        """Did several rollouts all write the same tokens? Then comparing them teaches nothing."""
        if len(self.trajectories) < 2:
            return False
        first, *others = self.trajectories.values()
        return all(other.tokens.is_like(first.tokens) for other in others)

    def dissolve(self) -> None:
        """Break the reference cycle with the trajectories, so that the memory is freed at once."""
        self.trajectories.clear()

    def held_steps(self) -> Iterator[StoredStep]:
        for trajectory in self.trajectories.values():
            yield from trajectory.held_steps()


@dataclass(slots=True, eq=False)
class Lease:
    """Data that a consumer has until `expires_at`. After that it goes back to the queue. An ack ends the lease."""

    uid: str
    channel: str
    expires_at: float
    """In pool time."""
    step_filter: StepFilter
    """Which of the steps the consumer gets."""
    groups: list[Group] = field(default_factory=list)
    steps: list[tuple[Trajectory, StoredStep]] = field(default_factory=list)
    version: int = 0
    """The pool's policy version when it was handed out."""
    is_prepared: bool = False
    """Its consumer is acknowledging a batch of several shards, or may have been before a restart: then the batch's
    coordinator knows how the lease ends."""


def marks_of(trajectory: Trajectory) -> tuple[str, ...]:
    marks = trajectory.metadata.get(MARKS)
    return tuple(mark for mark in marks if isinstance(mark, str)) if isinstance(marks, list) else ()
