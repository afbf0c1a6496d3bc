"""A pool whose shards are in the process of its client."""

import pytest

from rig.builders import make_step
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.client.in_process import InProcessTransport, start_in_process

PROMPTS = [f"p{n}" for n in range(8)]


async def test_it_is_a_pool_of_several_shards_whose_batches_are_acknowledged_together() -> None:
    pool = start_in_process(PoolPlan(shards=2))
    for prompt in PROMPTS:
        await pool.register_trajectory(Registration(prompt, prompt))
        assert await pool.submit_steps([make_step(prompt, prompt)]) == [SubmitVerdict.ACCEPTED]
        assert await pool.complete_trajectory(prompt, prompt, 1.0) is EndResult.COMPLETED
    batch = await pool.fetch_batch(len(PROMPTS), timeout=5.0, lease=60.0)
    assert {shard for shard, _ in batch.leases} == {"data_pool", "data_pool-1"}
    await pool.ack(batch)
    stats = await pool.stats()
    assert (stats.leases, stats.channels["train"].shipped.steps) == (0, len(PROMPTS))


async def test_a_trajectory_whose_steps_are_all_quarantined_is_read_until_it_is_taken() -> None:
    pool = start_in_process(PoolPlan())
    await pool.register_trajectory(Registration("t", "p"))
    await pool.submit_steps([make_step("t", "p", quarantine="cut_short: no end")])
    assert await pool.complete_trajectory("t", "p", 0.0) is EndResult.COMPLETED
    assert len(await pool.read([("t", "p")])) == 1


async def test_a_shard_that_is_not_there_is_missing_as_one_of_ray_is() -> None:
    with pytest.raises(PoolUnavailable, match="no DataPool named 'data_pool'"):
        await PoolClient("data_pool", transport=InProcessTransport({})).check()
