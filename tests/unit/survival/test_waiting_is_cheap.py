"""D, scale: what a fetch costs that waits on sixteen shards while data arrives."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.pool.api.producing import Registration
from stepwell.pool.shard.service import ShardService

SHARDS = 16
ARRIVALS = 80


class CountingTransport(LocalTransport):
    def __init__(self, services: dict[str, ShardService]) -> None:
        super().__init__(services)
        self.calls: Counter[str] = Counter()

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls[method] += 1
        return await super().call(shard, method, args, kwargs)


@pytest.mark.parametrize(("group_size", "calls_per_arrival"), [(2, 0.0), (1, 1.0)], ids=["unfinished", "ready"])
async def test_a_waiting_fetch_costs_at_most_one_call_for_each_group_that_becomes_ready(
    group_size: int, calls_per_arrival: float
) -> None:
    pool = LocalPool(shards=SHARDS, transport=CountingTransport)
    fetching = asyncio.create_task(pool.fetch_batch(ARRIVALS + 1, timeout=60.0, lease=60.0))
    looks = pool.transport.calls
    asked = SHARDS + 1  # the first shard tells its plan at once, and is asked again
    await until(lambda: looks["wait_news"] == asked, "a look at each shard, and a question that waits there")
    for n in range(ARRIVALS):
        await pool.register_trajectory(Registration(f"t{n}", f"p{n}", group_size=group_size))
        await pool.submit_steps([make_step(f"t{n}", f"p{n}")])
        await pool.complete_trajectory(f"t{n}", f"p{n}", 1.0)
    assert looks["peek"] == SHARDS, "there is never enough"
    assert looks["wait_news"] - asked <= calls_per_arrival * ARRIVALS
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)


async def test_the_group_that_completes_a_batch_costs_one_look_before_it_is_taken() -> None:
    pool = LocalPool(shards=SHARDS, transport=CountingTransport)
    await finish(pool, "first")
    fetching = asyncio.create_task(pool.fetch_batch(2, timeout=60.0, lease=60.0))
    calls = pool.transport.calls
    await until(lambda: calls["wait_news"] == SHARDS + 1, "a look at each shard, and a question that waits there", 10)
    calls.clear()
    await finish(pool, "second")
    assert sorted((await fetching).columns.prompt_uids) == ["first", "second"]
    assert calls["peek"] == 1, "only the shard that has changed is asked"
    assert calls["take"] <= 2
    assert calls["wait_news"] <= 1


async def finish(pool: LocalPool, uid: str) -> None:
    await pool.register_trajectory(Registration(uid, uid))
    await pool.submit_steps([make_step(uid, uid)])
    await pool.complete_trajectory(uid, uid, 1.0)
