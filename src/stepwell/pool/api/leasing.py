"""What consumers ask for, what they get under a lease, and what they would get next.

A preview leases, counts and drops nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar, Unpack
from uuid import uuid4

from stepwell.common.message_format import message, sent
from stepwell.errors import BadRequest
from stepwell.pool.api.producing import TRAIN
from stepwell.pool.api.transport import Revision
from stepwell.steps.columns import Columns, cut, stack
from stepwell.steps.returns import NOTHING_LEFT_OUT, LeftOutSteps, join_left_out, reorder_groups
from stepwell.steps.step import Exactness
from stepwell.steps.trainable import StepFilter


@sent
class Unit(StrEnum):
    """What a channel is consumed by. The first fetch from the channel decides."""

    GROUPS = "groups"
    TRAJECTORIES = "trajectories"
    """Complete ones, also when their group is not complete."""
    STEPS = "steps"
    """Single steps, as they arrive."""


@sent
class Order(StrEnum):
    OLDEST_READY = "oldest_ready"
    STRICT = "strict"
    """Oldest first. Nothing is handed out before the oldest is ready."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a consumer asks for."""

    count: int
    channel: str
    unit: Unit = Unit.GROUPS
    order: Order = Order.OLDEST_READY
    history: float = 0.0
    """The share of the batch that is drawn at random from groups that are already trained."""
    min_exactness: Exactness = Exactness.SUBMITTED
    """Steps of a lower grade are left out."""
    untrainable: bool = False
    """True includes the steps that are marked untrainable."""
    models: tuple[str, ...] = ()
    """The models that are trained, as the pool's limits say."""
    max_per_user: int | None = None
    """How many of each user it may have, if it is part of a batch of several shards. None: as the pool's
    max_share_per_user says."""
    user_rooms: Mapping[str, int] = field(default_factory=dict)
    """The same for single users, in place of max_per_user."""
    batch: int = 0
    """The count of the whole batch, if this is a part of it."""

    @property
    def step_filter(self) -> StepFilter:
        return StepFilter(self.min_exactness, self.untrainable, self.models)


class BatchTerms(TypedDict, total=False):
    """The keywords of every `fetch_batch`: the fields of `BatchRequest` in plain words. The channel is `train` if it is
    not given."""

    channel: str
    unit: str
    order: str
    history: float
    min_exactness: str
    untrainable: bool


ENUMS = {"unit": Unit, "order": Order, "min_exactness": Exactness}


def read_batch_request(count: int, **terms: Unpack[BatchTerms]) -> BatchRequest:
    """Check the caller's plain words and make a request of them."""
    given: dict[str, Any] = {"channel": TRAIN, **terms}
    try:
        request = BatchRequest(count=count, **given | {name: ENUMS[name](given[name]) for name in ENUMS.keys() & given})
    except ValueError as failure:
        raise BadRequest(str(failure)) from None
    if count < 1:
        raise BadRequest(f"a batch has at least one of its {request.unit}, not {count}")
    if not 0.0 <= request.history <= 1.0:
        raise BadRequest(f"history is a share of the batch, from 0 to 1, not {request.history}")
    return request


@message
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeasedGroups:
    """Groups that a consumer gets, oldest first."""

    columns: Columns
    group_sizes: list[int]
    """Steps in each group. A trajectory or a step that is taken by itself counts as a group."""
    opened_at: list[float]
    """When each group was opened. For a single step: when its call began."""
    attempts: list[int]
    """How often each group was handed out before."""
    from_history: list[bool]
    sources: list[str]
    """Where each group comes from."""
    leases: tuple[tuple[str, str], ...] = ()
    """(shard, lease) of every part: what an acknowledgement names."""
    left_out: LeftOutSteps = NOTHING_LEFT_OUT
    """What the groups did besides; advantages need it."""


def merge_leased_groups(parts: Sequence[LeasedGroups]) -> LeasedGroups:
    """All groups: new ones before those from history, then oldest first. A single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    opened_at = [at for part in parts for at in part.opened_at]
    from_history = [flag for part in parts for flag in part.from_history]
    order = sorted(range(len(opened_at)), key=lambda g: (from_history[g], opened_at[g]))
    groups = [group for part in parts for group in cut(part.columns, part.group_sizes)]
    sizes = [size for part in parts for size in part.group_sizes]
    sources = [source for part in parts for source in part.sources]
    attempts = [count for part in parts for count in part.attempts]
    return LeasedGroups(
        columns=stack([groups[g] for g in order]),
        group_sizes=[sizes[g] for g in order],
        opened_at=[opened_at[g] for g in order],
        attempts=[attempts[g] for g in order],
        from_history=[from_history[g] for g in order],
        sources=[sources[g] for g in order],
        leases=tuple(lease for part in parts for lease in part.leases),
        left_out=reorder_groups(
            join_left_out([part.left_out for part in parts], [len(part.group_sizes) for part in parts]), order
        ),
    )


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFill:
    """The request for a batch of exactly so many trajectories."""

    trajectories: int
    channel: str
    shares: Mapping[str, float]
    lease: float
    """Seconds."""
    step_filter: StepFilter


class HasLeases(Protocol):
    """Anything that was handed out under leases."""

    @property
    def leases(self) -> tuple[tuple[str, str], ...]:
        """(shard, lease) of every part."""


LIVE = "live-"
"""So begins the name of a lease whose holder sends heartbeats. A shard ends it some seconds after the last one."""


def new_reward_lease(shard: str) -> str:
    """The name of the lease of a reward worker begins with the shard that gives it."""
    return f"{shard}/{LIVE}{uuid4().hex}"


def is_reward_lease(lease_uid: str) -> bool:
    return "/" in lease_uid


def is_live(lease_uid: str) -> bool:
    """Does its holder send heartbeats?"""
    return lease_uid.rpartition("/")[2].startswith(LIVE)


COORDINATOR = "@"
"""In the name of a batch, before the shard that decides whether it is acknowledged."""
DECISION = ":decision"
"""So ends the name under which the coordinator keeps its decision, as it keeps how leases ended."""


def new_batch_uid(*, heartbeats: bool, coordinator: str = "") -> str:
    """The parts of a batch from several shards are acknowledged together: one of these shards is its coordinator."""
    uid = f"{LIVE if heartbeats else ''}{uuid4().hex}"
    return f"{uid}{COORDINATOR}{coordinator}" if coordinator else uid


def decision_of(lease_uid: str) -> tuple[str, str] | None:
    """The coordinator of the batch of a lease, and the name of its decision; None for a batch of one shard."""
    batch_uid = batch_of_lease(lease_uid)
    _, mark, coordinator = batch_uid.partition(COORDINATOR)
    return (coordinator, batch_uid + DECISION) if mark else None


def part_lease_uid(batch_uid: str, number: int) -> str:
    """The name of the lease of one part of a batch."""
    return f"{batch_uid}-{number}"


def batch_of_lease(lease_uid: str) -> str:
    """The parts of a batch have names that differ in their last number only."""
    batch_uid, _, number = lease_uid.rpartition("-")
    return batch_uid if number.isdecimal() else lease_uid


@sent
class Settlement(StrEnum):
    """What became of a lease that someone ended."""

    DONE = "done"
    EXPIRED = "expired"
    """Its time was over: the data is back in the queue and is handed out again."""
    UNKNOWN = "unknown"
    """There is no such lease. It ended long ago, or it was lost with a pool that has no journal."""


@message
class GroupOffer(NamedTuple):
    """A ready group that a shard could hand out."""

    shard: str
    seq: int
    age: int
    """Order of opening within its shard."""
    opened_at: float
    size: int
    """Trajectories that the consumer would get."""
    source: str
    user: str = ""
    """Whose session it is, if the pool has a max_share_per_user."""


@message
@dataclass(frozen=True, slots=True)
class ReadyGroups:
    """The ready groups of a channel."""

    groups: Mapping[str, Mapping[int, int]]
    """Number of groups, by source and by size. A group's size is its number of trajectories."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer, and are not counted."""

    @property
    def total_groups(self) -> int:
        return sum(sum(sizes.values()) for sizes in self.groups.values())

    @property
    def largest(self) -> int:
        """The size of the largest group; 0 if there is none."""
        return max((size for sizes in self.groups.values() for size in sizes), default=0)

    def trajectories_of(self, source: str) -> int:
        return sum(size * count for size, count in self.groups.get(source, {}).items())


def merge_ready_groups(parts: Iterable[ReadyGroups], missing: tuple[str, ...] = ()) -> ReadyGroups:
    groups: dict[str, Counter[int]] = {}
    for part in parts:
        for source, sizes in part.groups.items():
            groups.setdefault(source, Counter()).update(sizes)
    return ReadyGroups(groups, missing)


@message
class ReadyCounts(NamedTuple):
    """What a shard has for the consumers of a channel."""

    changes: int = 0
    """Grows whenever other things are ready, also if they are as many."""
    groups: int = 0
    trajectories: int = 0
    steps: int = 0
    history: int = 0

    def at_most(self, unit: Unit) -> int:
        """A consumer gets no more than that."""
        return {Unit.GROUPS: self.groups, Unit.TRAJECTORIES: self.trajectories, Unit.STEPS: self.steps}[unit]


@message
class ReadySummary(NamedTuple):
    """What a shard could hand out now."""

    revision: Revision
    """The revision of the channel's topic (see pool/api/transport.py)."""
    ages: list[float]
    """When each ready item was opened, oldest first."""
    nothing_after: float
    """In strict order, an item that was opened later must wait."""
    users: tuple[str, ...] = ()
    """The user of each ready item, if the pool has a max_share_per_user."""


T = TypeVar("T")
ROUNDING = 1e-9
"""0.29 × 100 is 28.999999999999996 as a float, and means 29."""


def max_per_user(share: float, count: int) -> int:
    """How much of one batch may come from one user: floor(share × count), at least 1."""
    return max(1, int(share * count + ROUNDING))


@dataclass(frozen=True, slots=True)
class UserLimit:
    """How much of one batch may come from each user. What belongs to no user is not limited. A batch of several shards
    has one limit: each part is told how many of each user it may have."""

    most: int
    """How many of each user there may be."""
    rooms: Mapping[str, int] = field(default_factory=dict)
    """The same for single users, in place of `most`."""

    def room(self, user: str) -> int:
        return self.rooms.get(user, self.most)

    def less(self, users: Iterable[str]) -> "UserLimit":
        """What is left after one was taken of each of these. A user may be named several times."""
        taken = Counter(user for user in users if user)
        return UserLimit(self.most, {**self.rooms, **{u: max(0, self.room(u) - n) for u, n in taken.items()}})

    def more(self, users: Iterable[str]) -> "UserLimit":
        """One more for each of these. A user may be named several times."""
        extra = Counter(user for user in users if user)
        return UserLimit(self.most, {**self.rooms, **{user: self.room(user) + n for user, n in extra.items()}})

    def keep(self, items: Iterable[T], user_of: Callable[[T], str]) -> list[T]:
        """The first items of each user, as many as there may be."""
        seen: Counter[str] = Counter()
        kept: list[T] = []
        for item in items:
            user = user_of(item)
            seen[user] += 1
            if not user or seen[user] <= self.room(user):
                kept.append(item)
        return kept


PREVIEWED = 500
"""Groups, trajectories or steps of a batch that are described at most."""
WAITING = 20
"""Groups that are not in the batch and are described at most."""
LATER = "the batch is full: its turn comes later"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewItem:
    """A group, trajectory or step in the queue."""

    prompt_uid: str
    group: int
    """The group's seq in its shard."""
    age: int
    opened_at: float
    source: str
    user: str
    size: int
    """Rollouts that the group is to have."""
    trajectories: tuple[str, ...]
    """The uids of those that the trainer would get; of a waiting group, of all that it has."""
    rewards: tuple[float | None, ...]
    """The return of each of `trajectories`."""
    steps: int
    """The steps that the trainer would get; of a waiting group, all that are held."""
    oldest_version: int | None
    behind: int
    """How many policy versions its oldest token is behind."""
    from_history: bool = False
    why: str = ""
    """Why it is not in the batch."""
    shard: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPreview:
    request: BatchRequest | ExactFill
    asked_at: float
    """When a consumer asked for such a batch last; 0 if none has since the shard started."""
    items: Sequence[PreviewItem]
    """What the shard would hand out, oldest first. For an exact fill, what it would offer."""
    count: int
    """How many that are, also those that are not described."""
    ready: ReadySummary
    """All of them that are not from history."""
    waiting: Sequence[PreviewItem]
    """The oldest groups of which nothing is among the items."""
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPreview:
    request: BatchRequest | ExactFill
    asked_at: float
    items: Sequence[PreviewItem]
    """The batch, or as much of it as there is; not all of a large one."""
    is_complete: bool
    """Would a fetch return at once?"""
    waiting: Sequence[PreviewItem]
    """The oldest groups that are not in the batch."""
    waits_for: str
    """What a fetch would wait for; empty if it would return at once."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer."""
