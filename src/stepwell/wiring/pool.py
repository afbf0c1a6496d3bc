"""`stepwell pool`."""

import asyncio
import logging
import multiprocessing
from dataclasses import replace

from stepwell.config.pool import PoolSettings
from stepwell.pool.api.plan import JournalSync, PoolPlan
from stepwell.pool.client.link import RayLink
from stepwell.pool.client.pool_keeper import keep_pool
from stepwell.pool.client.ray_cluster import join_ray

log = logging.getLogger("stepwell")


def run_pool(settings: PoolSettings) -> None:
    """Creates the DataPool or finds it; Ray keeps it running. With --keep, creates it again if Ray has lost it."""
    if settings.keep:
        asyncio.run(_keep_pool(settings))
    else:
        _create_pool(settings)


async def _keep_pool(settings: PoolSettings) -> None:
    link = RayLink(settings.ray_address, settings.ray_namespace)
    link.start()

    async def create(*, changes_shards: bool = False) -> None:
        """In a process of its own, because a process that has joined Ray ends with Ray's head."""
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_create_pool, args=(settings,), kwargs={"changes_shards": changes_shards})
        process.start()
        await asyncio.to_thread(process.join)

    if link.is_joined:
        await create(changes_shards=True)
    await keep_pool(link, settings.name, create)


def _pool_plan(settings: PoolSettings) -> PoolPlan:
    return PoolPlan(
        name=settings.name,
        shards=settings.shards,
        limits=settings.limits(),
        journal=settings.resolved_journal(),
        sync=JournalSync(settings.sync),
        min_free_bytes=settings.min_free_bytes,
        archive=settings.archive,
        resource=settings.resource,
    )


def _create_pool(settings: PoolSettings, *, changes_shards: bool = True) -> None:
    """A pool that was created before has as many shards as before, unless a number is given that it is to have."""
    from stepwell.pool.shard.actor import reshard_pool, start_pool

    join_ray(settings.ray_address, settings.ray_namespace)
    plan = _pool_plan(settings)
    in_force = start_pool(plan, settings.ray_namespace, new_journals=settings.new_journals)
    if changes_shards and "shards" in settings.model_fields_set and in_force.shards != plan.shards:
        log.info("DataPool %r has %d shards, and gets %d", plan.name, in_force.shards, plan.shards)
        in_force = reshard_pool(plan.name, plan.shards, settings.ray_namespace)
    if in_force != plan:
        shown = replace(in_force, journal=in_force.journal_name)
        log.warning("DataPool %r runs already with other settings, which are kept: %s", plan.name, shown)
    log.info("DataPool %r is up in Ray namespace %r", settings.name, settings.ray_namespace)
