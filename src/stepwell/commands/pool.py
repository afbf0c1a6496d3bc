"""`stepwell pool`: creates the DataPool."""

import asyncio
import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from stepwell.commands.sections import (
    GROUP_SIZE,
    Duration,
    Listed,
    RaySection,
)
from stepwell.pool.api.leasing import Order
from stepwell.pool.api.plan import (
    JournalSync,
    Limits,
    OnDeadline,
    OnIncomplete,
    OnRewardFailure,
    Overflow,
    PoolPlan,
)
from stepwell.pool.api.staleness import CONSEQUENCES

log = logging.getLogger("stepwell")

RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray counts itself, on every node."""

PARSED = {"overflow", "order", "on_deadline", "on_incomplete", "on_reward_failure", "unfinished_reward"}
"""Settings that have another form in Limits."""


class PoolSettings(RaySection, env_prefix="STEPWELL_POOL_"):
    """Create the DataPool on a running Ray cluster, and leave it there. An existing pool of this name is kept."""

    examples = (
        "stepwell pool --journal /var/lib/stepwell --max-staleness 4 --group-deadline 1800",
        "stepwell pool --name data_pool --shards 8 --journal /var/lib/stepwell",
    )

    name: str = "data_pool"
    """Name of the DataPool's Ray actor."""
    shards: int = Field(default=1, ge=1, le=256)
    """Number of actors that form the pool. Given for a pool that runs, it changes to this number."""
    journal: str | None = None
    """Folder of the journals, or postgresql:// URL; with it, a killed pool restarts with all acknowledged data."""
    sync: Literal["full", "normal"] = "full"
    """The event that acknowledged data survives: full, a loss of power; normal, a kill of the process."""
    new_journals: bool = False
    """Create journals that are missing while others of the pool are there; what they held is given up."""
    min_free_bytes: int = Field(default=256 * 2**20, ge=0)
    """Free bytes on the journals' disk below which the pool takes no new data; batches and rewards continue."""
    resource: str | None = Field(default=None, min_length=1)
    """Place the actors only on nodes with this custom Ray resource: the nodes that mount the journals' volume."""
    keep: bool = False
    """Stay, and create the pool again whenever Ray has lost it with its head."""
    archive: str | None = None
    """Folder or fsspec URL to which trained groups are written as Parquet; needs --journal."""
    max_queue_size: int = Field(default=10_000, ge=1)
    """Groups held per channel and shard."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes held per channel and shard; without it, an eighth of the memory of the shard's node or container, divided
    by the number of shards."""
    overflow: Literal["drop_oldest", "refuse"] = "drop_oldest"
    """The reaction of a full channel: drop_oldest, or refuse new trajectories."""
    group_size: int = Field(default=1, ge=1, validation_alias=GROUP_SIZE)
    """Trajectories in a group, where the registration does not say it. --n-rollouts is another name of this flag."""
    order: Literal["oldest_ready", "strict"] = "oldest_ready"
    """Which groups a fetch that names no order gets: oldest_ready, or strict: no group overtakes the oldest."""
    group_deadline: float | None = Field(default=None, gt=0)
    """Seconds that a group may take to complete."""
    on_deadline: Literal["partial", "drop", "refill"] = "partial"
    """The treatment of an incomplete group at the deadline: ship it partial, drop it, or refill it."""
    unfinished_reward: FiniteFloat | Literal["drop"] = 0.0
    """Reward of a rollout that is open at its group's deadline; drop: it is not trained, and fills no place."""
    min_group_size: int = Field(default=1, ge=1)
    """The fewest trajectories with which a partial group is shipped."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Policy versions that the oldest token may be behind when it is shipped."""
    on_stale: Literal[*CONSEQUENCES] = "drop"  # type: ignore[valid-type]
    """The treatment of older data: drop it, keep it, or mask its tokens."""
    require_reward: bool = False
    """Hold a group back until each of its trajectories has a reward; offer unscored ones to reward workers."""
    reward_attempts: int = Field(default=3, ge=1)
    """How often reward workers may fail to score a trajectory."""
    on_reward_failure: Literal["drop", "drop_group", "keep"] = "drop"
    """The consequence of the last failure: drop the trajectory, drop its group, or keep it without a reward."""
    on_incomplete: Literal["leave_out", "keep"] = "leave_out"
    """The treatment of a rollout that may lack a call because its gateway died: leave it out of batches, or keep it."""
    trained_models: Listed = ()
    """Names of the model or adapters that are trained, as the engines report them; steps of others are left out."""
    history_size: int = Field(default=0, ge=0)
    """Trained groups kept per channel and shard, for batches that mix in history."""
    completion_grace: float = Field(default=30.0, ge=0)
    """Seconds after a completion in which a call that began before it may still bring its step; then nothing may."""
    session_idle: float | None = Field(default=None, gt=0)
    """Seconds without a call after which a session is completed by itself; without it, sessions stay open."""
    retention: Duration | None = None
    """How long data is kept in the pool, its journals, its archive and spools: 30d, 12h; without it, for good. Data
    that is too old by the clock, while the pool has not run for so long, is kept until you confirm: stepwell forget
    --overdue."""
    max_share_per_user: float | None = Field(default=None, gt=0, le=1)
    """Largest share of a batch that sessions of one user may be; what is more waits for a later batch."""
    batch_size: int | None = Field(default=None, ge=1)
    """Trajectories per training step, for pacing; without it, the size of the last fetch."""

    def limits(self) -> Limits:
        return Limits(
            **self.model_dump(include=set(Limits.__slots__) - PARSED),
            unfinished_reward=None if self.unfinished_reward == "drop" else self.unfinished_reward,
            order=Order(self.order),
            overflow=Overflow(self.overflow),
            on_deadline=OnDeadline(self.on_deadline),
            on_incomplete=OnIncomplete(self.on_incomplete),
            on_reward_failure=OnRewardFailure(self.on_reward_failure),
        )

    def resolved_journal(self) -> str | None:
        """A folder as an absolute path: shards have another working directory."""
        if self.journal is None or "://" in self.journal:
            return self.journal
        return str(Path(self.journal).resolve())

    @field_validator("resource")
    @classmethod
    def _is_custom(cls, value: str | None) -> str | None:
        if value in RAY_RESOURCES:
            raise ValueError(f"{value} is a resource of Ray itself, and every node has it; choose another name")
        return value

    @model_validator(mode="after")
    def _archive_needs_journal(self) -> Self:
        if self.archive is not None and self.journal is None:
            raise ValueError("--archive needs --journal: groups wait there until their file is written")
        return self


def run_pool(settings: PoolSettings) -> None:
    """Creates the DataPool or finds it; Ray keeps it running. With --keep, creates it again if Ray has lost it."""
    if settings.keep:
        asyncio.run(_keep_pool(settings))
    else:
        _create_pool(settings)


async def _keep_pool(settings: PoolSettings) -> None:
    from stepwell.pool.client.link import RayLink
    from stepwell.pool.shard.resharding import keep_pool

    link = RayLink(settings.ray_address, settings.ray_namespace)
    link.start()

    async def create(*, changes_shards: bool = False) -> None:
        """Creates the pool in a process of its own, because a process that has joined Ray ends with Ray's head."""
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_create_pool, args=(settings,), kwargs={"changes_shards": changes_shards})
        process.start()
        await asyncio.to_thread(process.join)

    if link.is_joined:
        await create(changes_shards=True)
    await keep_pool(link, settings.name, create)


def _create_pool(settings: PoolSettings, *, changes_shards: bool = True) -> None:
    """A pool that was created before has as many shards as before, unless a number is given that it is to have."""
    from stepwell.pool.actors import reshard_pool, start_pool
    from stepwell.pool.client.ray_cluster import join_ray

    join_ray(settings.ray_address, settings.ray_namespace)
    plan = PoolPlan(
        name=settings.name,
        shards=settings.shards,
        limits=settings.limits(),
        journal=settings.resolved_journal(),
        sync=JournalSync(settings.sync),
        min_free_bytes=settings.min_free_bytes,
        archive=settings.archive,
        resource=settings.resource,
    )
    in_force = start_pool(plan, settings.ray_namespace, new_journals=settings.new_journals)
    if changes_shards and "shards" in settings.model_fields_set and in_force.shards != plan.shards:
        log.info("DataPool %r has %d shards, and gets %d", plan.name, in_force.shards, plan.shards)
        in_force = reshard_pool(plan.name, plan.shards, settings.ray_namespace)
    if in_force != plan:
        shown = replace(in_force, journal=in_force.journal_name)
        log.warning("DataPool %r runs already with other settings, which are kept: %s", plan.name, shown)
    log.info("DataPool %r is up in Ray namespace %r", settings.name, settings.ray_namespace)
