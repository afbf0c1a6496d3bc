"""What a DataPool is made of: its limits, what it does when one is reached, its shards, and which shard has a group.

- All limits hold per channel.
- Rendezvous hashing: the shard with the highest score for a prompt has its groups. A further shard takes its share from
  all others, and nothing moves between these. Hashes are the same in every process, unlike Python's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from zlib import crc32

from stepwell.common.http import hide_password
from stepwell.common.message_format import message, sent
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import Order

FIRST_REVISION = 1
"""The revision of a pool whose number of shards has not changed."""


@message
@dataclass(frozen=True, slots=True)
class Layout:
    revision: int
    shards: int

    def owner(self, prompt_uid: str) -> int:
        """The index of the shard. The first layout of a pool is that of the releases before rendezvous hashing."""
        if self.revision <= FIRST_REVISION:
            return crc32(prompt_uid.encode()) % self.shards
        return _highest_score(prompt_uid, self.shards)


@lru_cache(maxsize=16_384)
def _highest_score(prompt_uid: str, shards: int) -> int:
    prompt = prompt_uid.encode()
    return max(range(shards), key=lambda shard: blake2b(prompt, digest_size=8, key=shard.to_bytes(4)).digest())


@sent
class GroupElsewhere(PoolUnavailable):
    """The shard does not have the group, and may not open it."""


@sent
class LayoutDiffers(PoolUnavailable):
    """The call was routed by another revision of the plan than the shard's."""


MEMORY_SHARE = 1 / 8
"""The part of a node's memory that the shards of a pool together may hold in one channel. There may be several
channels, and the node has other work."""


@sent
class Overflow(StrEnum):
    """What happens when a channel is full."""

    DROP_OLDEST = "drop_oldest"
    """The oldest group goes; if a producer holds much, the oldest group of the one that holds the most."""
    REFUSE = "refuse"
    """New trajectories are refused; running ones may finish."""


@sent
class OnDeadline(StrEnum):
    """What happens to a group that is not complete in time."""

    PARTIAL = "partial"
    """It is shipped with its complete trajectories if there are at least min_group_size; otherwise it is dropped."""
    DROP = "drop"
    REFILL = "refill"
    """Producers are asked for as many new rollouts as it lacks."""


@sent
class OnRewardFailure(StrEnum):
    """What happens to a trajectory after the last attempt to score it has failed."""

    DROP = "drop"
    """It leaves its group, and another rollout can take its place."""
    DROP_GROUP = "drop_group"
    KEEP = "keep"
    """It stays without a reward until someone gives one or its group's deadline passes."""


@sent
class OnIncomplete(StrEnum):
    """What happens to a rollout that may lack a call, because the gateway that answered it died."""

    LEAVE_OUT = "leave_out"
    KEEP = "keep"


@sent
class JournalSync(StrEnum):
    """What an acknowledged change survives."""

    FULL = "full"
    """A loss of power: the disk has it."""
    NORMAL = "normal"
    """A kill of the process. A crash of the machine may cost the last changes."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_queue_size: int = 10_000
    """Groups held. Groups under lease do not count."""
    max_bytes: int | None = None
    """Bytes of memory held: tokens and log-probabilities as stored, and the records of steps, trajectories and groups.
    One trajectory may hold a quarter of it."""
    overflow: Overflow = Overflow.DROP_OLDEST
    group_size: int = 1
    """Trajectories in a group if its first registration does not say."""
    order: Order = Order.OLDEST_READY
    """The order of fetches that name none."""
    group_deadline: float | None = None
    """Seconds a group may take from its first trajectory to its completion. Sessions have no deadline."""
    on_deadline: OnDeadline = OnDeadline.PARTIAL
    unfinished_reward: float | None = 0.0
    """The reward of a rollout that is open at its group's deadline: it is completed with it, unless the whole group is
    dropped. None: the rollout is dropped instead, so what takes long is not trained."""
    min_group_size: int = 1
    """The fewest complete trajectories that are shipped as a partial group."""
    max_staleness: int | None = None
    """How far the oldest token may be when it is shipped."""
    stale_by: str = "versions"
    """How that is counted: a name in DISTANCES."""
    on_stale: str = "drop"
    """What happens to older data: a name in CONSEQUENCES."""
    require_reward: bool = False
    """True: a group is ready only when each of its trajectories has a reward, and reward workers are offered those
    without one."""
    reward_attempts: int = 3
    """How often reward workers may fail to score a trajectory."""
    on_reward_failure: OnRewardFailure = OnRewardFailure.DROP
    on_incomplete: OnIncomplete = OnIncomplete.LEAVE_OUT
    trained_models: tuple[str, ...] = ()
    """Names of the model or adapters that are trained. Steps of others are left out of batches; empty means any."""
    history_size: int = 0
    """Trained groups that are kept for batches that mix new and old."""
    completion_grace: float = 30.0
    """Seconds after a trajectory's completion in which steps are accepted of calls that began before it."""
    session_idle: float | None = None
    """Seconds without a call after which a session's trajectory is completed; None: never."""
    retention: float | None = None
    """Seconds after which data is removed from the pool and from every file; None: it is kept."""
    max_share_per_user: float | None = None
    """The largest part of a batch that sessions of one user may be; None: any."""
    batch_size: int | None = None
    """Trajectories per training step, for pacing. None: the number that the last fetch took."""
    max_channels: int = 64
    closed_kept: int = 100_000
    """How many closed trajectories are remembered, so that a late step is told apart from an unknown one."""
    gone_kept: int = 20_000
    """How many of these are remembered with their snapshot, for watchers."""
    quarantine_kept: int = 256
    """How many quarantined steps are kept for inspection. All are counted."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Every shard holds the whole plan, so that a client can ask any of them."""

    name: str = "data_pool"
    shards: int = 1
    limits: Limits = field(default_factory=Limits)
    journal: str | None = None
    """Folder of the shards' journals, or URL of their database; None keeps the pool in memory only."""
    sync: JournalSync = JournalSync.FULL
    """When a change is acknowledged."""
    min_free_bytes: int = 256 * 2**20
    """Free space on the journals' disk below which shards take no new data."""
    archive: str | None = None
    """Folder or fsspec URL to which trained groups are written as Parquet."""
    resource: str | None = None
    """Custom Ray resource of the nodes that shards may run on; None is any node."""
    uid: str = field(default="", compare=False)
    """Made when the pool is created, and written in its journals."""
    nodes: tuple[str, ...] = field(default=(), compare=False)
    """With journals and without a resource, the address of the node on which each shard runs."""

    revision: int = field(default=0, compare=False)
    """Raised with every change of the shards. 0 before a shard has the plan."""
    draining: tuple[Layout, ...] = field(default=(), compare=False)
    """Former layouts, oldest first. Groups that were opened by them stay where they are until they leave the pool."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The last one is the present one."""
        return (*self.draining, Layout(self.revision, self.shards))

    def with_layouts(self, layouts: Sequence[Layout]) -> "PoolPlan":
        *draining, present = layouts
        return replace(self, shards=present.shards, revision=present.revision, draining=tuple(draining))

    @property
    def journal_name(self) -> str | None:
        """The journal as it may be shown: without a password."""
        return self.journal and hide_password(self.journal)

    def shard_names(self) -> tuple[str, ...]:
        """All that run, those that are being emptied last. The first has the pool's own name, so that a client that
        knows it finds the others."""
        count = max(layout.shards for layout in self.layouts)
        return (self.name, *(f"{self.name}-{n}" for n in range(1, count)))

    def index_of(self, shard: str) -> int:
        """The shard may be one that is no longer part of the pool."""
        return 0 if shard == self.name else int(shard.removeprefix(f"{self.name}-"))

    def owners(self, prompt_uid: str) -> tuple[str, ...]:
        """The shards that may have a group: first those of former layouts, last the one that may open it."""
        *former, present = (layout.owner(prompt_uid) for layout in self.layouts)
        indexes = (*(index for index in dict.fromkeys(former) if index != present), present)
        return tuple(f"{self.name}-{index}" if index else self.name for index in indexes)

    @property
    def routing(self) -> str:
        """By which calls are routed, for a person: "revision 3 (2 -> 8 -> 6 shards)"."""
        return f"revision {self.revision} ({' -> '.join(str(layout.shards) for layout in self.layouts)} shards)"

    @property
    def stamp(self) -> Mapping[str, int]:
        """What a call that was routed by this plan carries."""
        return {"revision": self.revision}

    def resharded(self, shards: int) -> "PoolPlan":
        """New groups go to so many shards from now on."""
        return self.with_layouts((*self.layouts, Layout(self.revision + 1, shards)))

    def drained(self) -> "PoolPlan":
        """No shard has a group of a former layout any more."""
        return self.with_layouts([Layout(self.revision + 1, self.shards)])


def bounded_limits(plan: PoolPlan, memory: int) -> Limits:
    """The plan's, with a bound for bytes. `memory` is in bytes. All shards of the pool may be on one node."""
    if plan.limits.max_bytes is not None:
        return plan.limits
    return replace(plan.limits, max_bytes=int(memory * MEMORY_SHARE) // plan.shards)
