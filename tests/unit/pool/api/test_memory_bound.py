from stepwell.pool.slices.producing import AddSteps, Register

from rig.asked import asked
from rig.builders import make_step
from stepwell.pool.api.plan import Limits, PoolPlan, bounded_limits
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import pack

GIB = 2**30


def test_a_pool_without_a_bound_gets_an_eighth_of_the_memory_for_all_its_shards() -> None:
    limits = Limits(max_queue_size=7)
    assert bounded_limits(PoolPlan(limits=limits), 64 * GIB) == Limits(max_queue_size=7, max_bytes=8 * GIB)
    assert bounded_limits(PoolPlan(shards=4, limits=limits), 64 * GIB).max_bytes == 2 * GIB


def test_a_bound_that_is_given_stays() -> None:
    assert bounded_limits(PoolPlan(shards=4, limits=Limits(max_bytes=10)), 64 * GIB).max_bytes == 10


async def test_a_shard_keeps_within_the_bound_of_its_node_and_tells_the_plan_as_it_was_given() -> None:
    plan = PoolPlan(name="pool")
    service = ShardService(plan, "pool", limits=bounded_limits(plan, 800_000))
    for n in range(100):
        await service.run([Register(Registration(f"t{n}", f"p{n}"))])
        step = make_step(f"t{n}", f"p{n}", prompt_ids=range(250))
        assert await asked(service, AddSteps(pack([step]))) == [SubmitVerdict.ACCEPTED]
    assert (await service.stats()).channels["train"].nbytes <= 100_000
    assert (await service.plan()).limits.max_bytes is None
