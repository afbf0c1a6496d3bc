import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.transport import ActorAway, ActorMissing
from stepwell.pool.shard.resharding import keep_pool


class Shards:
    """The shards that Ray has; those in `away` restart."""

    connections = 1

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.away: set[str] = set()
        self.looks = 0

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> PoolPlan:
        self.looks += 1
        if actor in self.away:
            raise ActorAway("killed")
        if actor not in self.names:
            raise ActorMissing(actor)
        return PoolPlan(name="p", shards=2)


async def keep_for(shards: Shards, looks: int) -> int:
    """How often the pool was created until that many looks were taken."""
    created = 0

    async def create() -> None:
        nonlocal created
        created += 1
        shards.names |= {"p", "p-1"}

    keeping = asyncio.create_task(keep_pool(shards, "p", create, interval=0.0))
    while shards.looks < looks:
        await asyncio.sleep(0)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    return created


async def test_a_pool_that_ray_has_lost_is_created_once() -> None:
    assert await keep_for(Shards(), 10) == 1


async def test_a_pool_of_which_one_shard_is_missing_is_created_again() -> None:
    assert await keep_for(Shards("p"), 10) == 1


async def test_a_pool_that_is_there_or_restarts_is_left_alone() -> None:
    shards = Shards("p", "p-1")
    for away in ("p", "p-1"):
        shards.away, shards.looks = {away}, 0
        assert await keep_for(shards, 10) == 0
