"""One question waits at a shard for all who wait: several clients through one transport, as processes behind a link."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rig.asked import called
from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.producing import TRAIN, Registration
from stepwell.pool.api.transport import SERVING, SYNC, UNSCORED, UNSEEN, Revision, flush_topic, ready_topic
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link_messages import GatheringTransport
from stepwell.pool.shard.service import ShardService
from tests.unit.survival.test_shards_change_while_the_pool_runs import change

FIRST = "data_pool"


class CountedQuestions:
    """To the shards of a pool in this process."""

    connections = 1

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.asked: list[Mapping[str, Revision]] = []
        self.calls: Counter[str] = Counter()
        self.waiting = 0
        """Questions without an answer."""

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls[called(method, args)] += 1
        if method != "wait_news":
            return await self.pool.transport.call(actor, method, args, kwargs)
        self.asked.append(args[1])
        self.waiting += 1
        try:
            return await self.pool.transport.call(actor, method, args, kwargs)
        finally:
            self.waiting -= 1


@pytest.fixture
def pool() -> LocalPool:
    return LocalPool(require_reward=True)


@pytest.fixture
def counted(pool: LocalPool) -> CountedQuestions:
    return CountedQuestions(pool)


@pytest.fixture
def clients(counted: CountedQuestions) -> list[PoolClient]:
    shared = GatheringTransport(counted)
    return [PoolClient(FIRST, transport=shared) for _ in range(4)]


@pytest.fixture
def shard(pool: LocalPool) -> ShardService:
    service: ShardService = pool.transport.services[FIRST]
    return service


async def settle(counted: CountedQuestions) -> None:
    """Until one question waits, with all that is asked."""
    before = -1
    while before != len(counted.asked):
        before = len(counted.asked)
        await asyncio.sleep(0.05)
    await until(lambda: counted.waiting == 1, "the earlier questions to end", 5)


async def seen(client: PoolClient, *topics: str) -> dict[str, Revision]:
    news = await client.shards.wait_news(FIRST, dict.fromkeys(topics, UNSEEN))
    return {topic: item.revision for topic, item in news.items()}


async def test_processes_with_different_interests_share_one_question_and_each_hears_of_its_own(
    clients: list[PoolClient], counted: CountedQuestions, shard: ShardService
) -> None:
    known = await seen(clients[0], SERVING, UNSCORED)
    gateway = asyncio.create_task(clients[1].shards.wait_news(FIRST, {SERVING: known[SERVING]}))
    worker = asyncio.create_task(clients[2].shards.wait_news(FIRST, {UNSCORED: known[UNSCORED]}))
    await settle(counted)
    assert {SERVING, UNSCORED} <= counted.asked[-1].keys()
    await shard.set_policy_version(3)
    async with asyncio.timeout(5):
        assert (await gateway)[SERVING].value.policy_version == 3
    await settle(counted)
    assert not worker.done()
    await clients[0].register_trajectory(Registration("t", "p"))
    await clients[0].submit_steps([make_step("t", "p")])
    await clients[0].complete_trajectory("t", "p", None)
    async with asyncio.timeout(5):
        assert (await worker).keys() == {UNSCORED}


async def test_who_comes_back_for_the_next_news_of_a_topic_costs_the_shard_no_further_question(
    clients: list[PoolClient], counted: CountedQuestions, shard: ShardService
) -> None:
    following = [asyncio.create_task(client.follow()) for client in clients]
    await settle(counted)
    before = len(counted.asked)
    for version in range(1, 6):
        await shard.set_policy_version(version)
        for client in clients:
            async with asyncio.timeout(5):
                while client.policy_version != version:
                    await client.serving_after(client.serving)
        await settle(counted)
    assert len(counted.asked) - before == 5, "one for all processes"
    for task in following:
        task.cancel()


async def test_who_has_seen_less_than_the_others_is_answered_at_once(
    clients: list[PoolClient], counted: CountedQuestions, shard: ShardService
) -> None:
    old = await seen(clients[0], SERVING)
    await shard.set_policy_version(2)
    new = await seen(clients[1], SERVING)
    waiting = asyncio.create_task(clients[1].shards.wait_news(FIRST, new))
    await settle(counted)
    async with asyncio.timeout(5):
        assert (await clients[0].shards.wait_news(FIRST, old))[SERVING].value.policy_version == 2
    assert not waiting.done()
    waiting.cancel()


async def test_all_who_wait_hear_that_the_shard_is_away_and_of_the_one_that_follows_it(
    pool: LocalPool, clients: list[PoolClient], counted: CountedQuestions, shard: ShardService
) -> None:
    await shard.set_policy_version(9)
    following = [asyncio.create_task(client.follow()) for client in clients]
    await until(lambda: {client.policy_version for client in clients} == {9}, "the version to arrive", 5)
    await settle(counted)
    waits = [asyncio.create_task(client.shards.wait_news(FIRST, await seen(client, SYNC))) for client in clients]
    await settle(counted)
    pool.transport.services[FIRST] = ShardService(pool.plan, FIRST, recheck_interval=0.01)
    shard._transactions._refusal = "killed"
    for wait in waits:
        with pytest.raises(PoolUnavailable):
            await asyncio.wait_for(wait, 5)
    await until(lambda: {client.policy_version for client in clients} == {0}, "the next shard to be heard", 10)
    for task in following:
        task.cancel()


async def test_a_process_that_has_asked_anew_has_its_earlier_question_ended(counted: CountedQuestions) -> None:
    link = GatheringTransport(counted)
    earlier = asyncio.create_task(link.call(FIRST, "wait_news", ("gateway", {SERVING: UNSEEN}, 30.0), {}))
    known = (await earlier)[SERVING].revision
    earlier = asyncio.create_task(link.call(FIRST, "wait_news", ("gateway", {SERVING: known}, 30.0), {}))
    await settle(counted)
    later = asyncio.create_task(link.call(FIRST, "wait_news", ("gateway", {flush_topic("g"): known}, 30.0), {}))
    async with asyncio.timeout(5):
        assert await earlier == {}
    assert (await later).keys() == {flush_topic("g")}, "nothing is known of it, which is another revision"


async def test_what_is_no_question_is_refused_and_spoils_none(counted: CountedQuestions) -> None:
    link = GatheringTransport(counted)
    for seen_before in ({SERVING: Revision("", "1")}, {1: UNSEEN}):  # type: ignore[arg-type]
        with pytest.raises(BadRequest):
            await link.call(FIRST, "wait_news", ("other", seen_before, 30.0), {})
    assert SERVING in await link.call(FIRST, "wait_news", ("gateway", {SERVING: UNSEEN}, 30.0), {})


async def test_a_plan_is_told_and_not_looked_for(
    pool: LocalPool, clients: list[PoolClient], counted: CountedQuestions
) -> None:
    client = clients[0]
    following = asyncio.create_task(client.follow())
    await settle(counted)
    client.shards._looked_at = -1e9
    looks = counted.calls["plan"]
    assert len(await client.shards.names()) == 1
    assert counted.calls["plan"] == looks
    await change(pool, 3)
    async with asyncio.timeout(5):
        while len(await client.shards.names()) < 3:
            await client.shards.next_plan(5.0)
    following.cancel()


async def test_whoever_waits_for_data_waits_at_a_new_shard_too(pool: LocalPool, clients: list[PoolClient]) -> None:
    worker = asyncio.create_task(clients[0].take_unscored(1, lease=60.0, timeout=30.0))
    trainer = asyncio.create_task(clients[1].fetch_batch(1, timeout=30.0))
    await until(lambda: pool.transport.services[FIRST].shard.news.waits(ready_topic(TRAIN)), "both to wait", 5)
    await change(pool, 3)
    moved = next(p for p in map(str, range(100)) if Layout(2, 3).owner(p) == 2)
    async with asyncio.timeout(10):
        while True:  # until the worker waits again
            if worker.done() and worker.result() is None:
                worker = asyncio.create_task(clients[0].take_unscored(1, lease=60.0, timeout=30.0))
                break
            await asyncio.sleep(0.01)
        for uid, reward in (("judged", 1.0), ("unjudged", None)):
            await pool.register_trajectory(Registration(uid, moved))
            await pool.submit_steps([make_step(uid, moved)])
            await pool.complete_trajectory(uid, moved, reward)
        taken, batch = await asyncio.gather(worker, trainer)
    assert taken is not None
    assert [step.trajectory_uid for steps in taken[1] for step in steps] == ["unjudged"]
    assert batch.columns.trajectory_uids == ["judged"]


async def test_engines_are_reported_when_they_have_changed_and_when_the_shard_has(
    pool: LocalPool, clients: list[PoolClient], counted: CountedQuestions
) -> None:
    client = clients[0]
    client._flushes.gateway = "g"
    following = asyncio.create_task(client.follow())
    await until(lambda: client.serving is not None and client._serving.sync_expected is not None, "the pool to tell", 5)
    for _ in range(20):
        assert await client.report_engines({"http://a": 1}) is False
    assert counted.calls["ReportEngines"] == 1
    await client.announce_sync()
    await until(lambda: client._serving.sync_expected is True, "the trainer to be heard of", 5)
    assert await client.report_engines({"http://a": 1}) is True
    assert counted.calls["ReportEngines"] == 1
    await client.report_engines({"http://a": 2})
    assert counted.calls["ReportEngines"] == 2
    pool.transport.services[FIRST].shard.epoch = pool.transport.services[FIRST].shard.news._epoch = "restarted"
    await client.set_policy_version(1, check=False)
    await client.report_engines({"http://a": 2})
    assert counted.calls["ReportEngines"] == 3, "another process of the shard knows nothing"
    following.cancel()
