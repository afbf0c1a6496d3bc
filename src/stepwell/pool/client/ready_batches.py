"""Many small batches in one call to each shard, each under a lease of its own."""

import asyncio
from dataclasses import replace

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import BatchRequest, LeasedGroups, new_batch_uid, part_lease_uid
from stepwell.pool.client.held_leases import HeldLeases
from stepwell.pool.client.shards import ShardSet


async def take_ready(
    shards: ShardSet, held: HeldLeases, request: BatchRequest, most: int, lease: float
) -> list[LeasedGroups]:
    """Of each shard its oldest ones, as many as are ready now, `most` of all shards together. A shard that is away has
    none."""
    names, request = await shards.names(), replace(request, batch=most)
    sizes = [(most + number) // len(names) for number in range(len(names))]
    taken: list[LeasedGroups] = []
    try:
        async with asyncio.TaskGroup() as calls:
            for name, size in zip(names, sizes, strict=True):
                if size:
                    calls.create_task(_take_of(shards, held, name, request, size, lease, taken))
    except BaseException as failure:
        held.put_back([part for batch in taken for part in batch.leases])
        if isinstance(failure, BaseExceptionGroup):
            raise failure.exceptions[0] from None
        raise
    return sorted(taken, key=lambda batch: batch.opened_at[0])


async def _take_of(
    shards: ShardSet,
    held: HeldLeases,
    name: str,
    request: BatchRequest,
    most: int,
    lease: float,
    taken: list[LeasedGroups],
) -> None:
    leases = [(name, part_lease_uid(new_batch_uid(heartbeats=True), 0)) for _ in range(most)]
    with held.holding(*leases):
        try:
            take = shards.at(name, await_restart=False).take_several(request, lease, [uid for _, uid in leases])
            batches = await shards.while_it_answers(name, take)
        except PoolUnavailable:
            held.put_back(leases)
            return
    held.release(leases[len(batches) :])
    taken += batches
