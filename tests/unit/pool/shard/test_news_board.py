"""What a shard posts, and how its questions end."""

import asyncio

import pytest

from rig.asked import asked
from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.transport import PLAN, SERVING, SYNC, UNSCORED, UNSEEN, Revision, Seen, ready_topic
from stepwell.pool.shard.gateway_roster import ANNOUNCED_FOR
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.policy import AnnounceSync

READY = ready_topic("train")


async def seen_now(shard: ShardService, *topics: str) -> Seen:
    news = await shard.wait_news("looks", dict.fromkeys(topics, UNSEEN), 0.0)
    return {topic: item.revision for topic, item in news.items()}


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool(require_reward=True, group_deadline=60.0)


@pytest.fixture
def shard(pool: LocalPool) -> ShardService:
    service: ShardService = pool.transport.services["data_pool"]
    return service


async def test_a_step_that_makes_nothing_ready_posts_nothing_and_a_ready_group_posts_how_much_there_is(
    pool: LocalPool, shard: ShardService
) -> None:
    await pool.register_trajectory(Registration("t", "p"))
    seen = await seen_now(shard, READY, UNSCORED)
    await pool.submit_steps([make_step("t", "p")])
    assert await shard.wait_news("waits", seen, 0.0) == {}
    await pool.complete_trajectory("t", "p", 1.0)
    (news,) = (await shard.wait_news("waits", seen, 0.0)).items()
    assert (news[0], news[1].value.at_most(Unit.GROUPS)) == (READY, 1)


async def test_what_time_changes_is_posted_while_somebody_waits(pool: LocalPool, shard: ShardService) -> None:
    await asked(shard, AnnounceSync())
    await pool.register_trajectory(Registration("t", "p"))
    seen = await seen_now(shard, READY, SYNC)
    deadline = asyncio.create_task(shard.wait_news("trainer", {READY: seen[READY]}, 30.0))
    sync = asyncio.create_task(shard.wait_news("gateway", {SYNC: seen[SYNC]}, 30.0))
    await asyncio.sleep(0)
    pool._now = ANNOUNCED_FOR + 1.0
    async with asyncio.timeout(5):
        assert READY in await deadline, "a group that is too late is gone"
        assert (await sync)[SYNC].value is False


async def test_a_later_question_of_the_same_asker_ends_the_earlier_one_and_no_other(shard: ShardService) -> None:
    seen = await seen_now(shard, SERVING, PLAN)
    earlier, other = (asyncio.create_task(shard.wait_news(name, seen, 30.0)) for name in ("link", "other"))
    await asyncio.sleep(0)
    later = asyncio.create_task(shard.wait_news("link", seen, 30.0))
    async with asyncio.timeout(5):
        assert await earlier == {}
    await shard.set_policy_version(1)
    assert (await later).keys() == (await other).keys() == {SERVING}
    assert not shard.shard.news.is_asked


async def test_after_a_restart_everything_is_news() -> None:
    before = ShardService(PoolPlan(limits=Limits()), "data_pool")
    seen = await seen_now(before, SERVING, READY, "anything")
    after = ShardService(PoolPlan(limits=Limits()), "data_pool")
    assert (await after.wait_news("link", seen, 0.0)).keys() == seen.keys()
    assert Revision() == UNSEEN


async def test_a_question_ends_with_the_shard(shard: ShardService) -> None:
    waiting = asyncio.create_task(shard.wait_news("link", await seen_now(shard, SERVING), 30.0))
    await asyncio.sleep(0)
    shard._transactions._refusal = "the journal failed"
    with pytest.raises(PoolUnavailable, match="the journal failed"):
        await asyncio.wait_for(waiting, 5)
