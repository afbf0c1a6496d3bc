"""Handing out: what a consumer asks for, what it gets, and for how long it is its own."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import HeldStep
from stepwell.steps.columns import Columns
from stepwell.steps.step import Exactness
from stepwell.steps.step_filter import StepFilter


class Unit(StrEnum):
    """What a channel is consumed by. The first to fetch from it decides."""

    GROUPS = "groups"
    TRAJECTORIES = "trajectories"
    """Complete ones, whether their group is or not."""
    STEPS = "steps"
    """Single ones, as they arrive."""


class Order(StrEnum):
    OLDEST_READY = "oldest_ready"
    STRICT = "strict"
    """Oldest first, and nothing before the oldest is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a consumer asks for."""

    count: int
    channel: str
    unit: Unit = Unit.GROUPS
    order: Order = Order.OLDEST_READY
    history: float = 0.0
    """The share of the batch that is drawn at random from what was already trained."""
    min_exactness: Exactness = Exactness.SUBMITTED
    """Steps of a lower grade are left out."""
    untrainable: bool = False
    """Also the steps marked untrainable, which are left out otherwise."""

    @property
    def step_filter(self) -> StepFilter:
        return StepFilter(self.min_exactness, self.untrainable)


@dataclass(slots=True, eq=False)
class Lease:
    """Data that a consumer has until `expires_at`, then comes back. Ack ends it for good."""

    uid: str
    channel: str
    expires_at: float
    step_filter: StepFilter
    """What of it the consumer got to see."""
    groups: list[Group] = field(default_factory=list)
    steps: list[tuple[Trajectory, HeldStep]] = field(default_factory=list)
    version: int = 0
    """The pool's policy version when it was handed out."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a consumer gets."""

    columns: Columns
    group_sizes: list[int]
    """Steps in each group; a trajectory or a step taken by itself is a group of its own."""
    opened_at: list[float]
    """When each was opened; of a step taken by itself, when its call began."""
    attempts: list[int]
    from_history: list[bool]
    sources: list[str]


class Leased(Protocol):
    """Anything that was handed out under leases: a batch, or a filled one."""

    @property
    def leases(self) -> tuple[tuple[str, str], ...]:
        """(shard, lease) of every part."""


class Settlement(StrEnum):
    """What became of a lease that someone ended."""

    DONE = "done"
    EXPIRED = "expired"
    """Its time was up: the data has gone back, and will be handed out again."""
    UNKNOWN = "unknown"
    """There is no such lease: it was ended long ago, or lost with a pool that has no journal."""
