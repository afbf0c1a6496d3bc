"""The canary, decisions and version rewards of a pool of several shards."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from stepwell.pool.slices.producing import AddSteps

from rig.asked import asked
from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.policy import Canary, PolicyDecision, RewardTally, VersionReward
from stepwell.pool.client.data_pool import DataPool
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.policy import Decide, ReadDecisions, ReadVersionRewards
from stepwell.steps.columns import pack
from tests.unit.pool.shard.journals import kill

CANARY = Canary(4, ("http://b",), 0.25, began_at=1.0)


def decision(action: str, at: float = 1.0, version: int = 4) -> PolicyDecision:
    return PolicyDecision(version, action, "guard", "why", at)  # type: ignore[arg-type]


async def reward(client: LocalPool, shard: str, version: int, value: float, uid: str = "t") -> None:
    service = client.transport.services[shard]
    await asked(service, AddSteps(pack([make_step(uid, uid, reward=value, policy_version=version)]), channel="train"))


@pytest.fixture
def client() -> LocalPool:
    return LocalPool(shards=2, part_timeout=0.05, timeout=5.0)


async def test_a_decision_sets_the_canary_and_reaches_every_shard(client: LocalPool) -> None:
    await client.decide(decision("canary"), CANARY, 3)
    assert await client.canary() == CANARY
    assert client.serving is not None
    assert client.serving.canary == CANARY
    await client.decide(decision("rollback", at=2.0))
    assert await client.canary() is None
    for service in client.transport.services.values():
        serving = await service.serving()
        assert (serving.policy_version, serving.withdrawn) == (3, (4,))
    assert [found.action for found in await client.decisions()] == ["canary", "rollback"]


async def test_a_shard_that_is_away_learns_what_was_rolled_back_before_the_decision_returns(client: LocalPool) -> None:
    await client.set_policy_version(3)
    client.transport.shards_away = {"data_pool-1"}
    deciding = asyncio.create_task(client.decide(decision("rollback")))
    while await client.decisions() == []:
        await asyncio.sleep(0)
    await client.set_policy_version(5)
    assert not deciding.done()
    client.transport.shards_away = set()
    await deciding
    serving = await client.transport.services["data_pool-1"].serving()
    assert (serving.policy_version, serving.withdrawn) == (5, (4,))


async def test_rewards_are_read_once_whichever_shard_has_them(client: LocalPool) -> None:
    await reward(client, "data_pool", 3, 1.0, "early")
    start = await client.version_rewards("train")
    assert start.rewards == []
    await reward(client, "data_pool", 3, 0.5)
    await reward(client, "data_pool-1", 4, -1.0)
    read = await client.version_rewards("train", start.cursor)
    assert list(read.rewards) == [VersionReward(3, 0.5, "t"), VersionReward(4, -1.0, "t")]
    assert (await client.version_rewards("train", read.cursor)).rewards == []
    assert (await client.version_rewards("validation", {})).rewards == []
    status = await client.policy_status()
    assert status.rewards == {3: RewardTally(2, 1.5), 4: RewardTally(1, -1.0)}
    assert (status.rewards[3].mean, RewardTally().mean) == (0.75, None)


async def test_a_shard_that_does_not_answer_is_read_later(client: LocalPool) -> None:
    await reward(client, "data_pool-1", 3, 1.0, "early")
    client.transport.shards_stopped = {"data_pool-1"}
    start = await client.version_rewards("train")
    client.transport.shards_stopped = set()
    read = await client.version_rewards("train", start.cursor)
    assert read.rewards == [], "it was there before anyone asked"
    client.transport.shards_stopped = {"data_pool-1"}
    await reward(client, "data_pool-1", 4, 1.0)
    later = await client.version_rewards("train", read.cursor)
    client.transport.shards_stopped = set()
    assert later.rewards == []
    assert [found.version for found in (await client.version_rewards("train", later.cursor)).rewards] == [4]


async def test_a_shard_without_a_journal_that_restarted_says_that_rewards_are_missed(client: LocalPool) -> None:
    await reward(client, "data_pool-1", 3, 1.0)
    read = await client.version_rewards("train", {})
    del client.transport.services["data_pool-1"]
    client.add_shards(client.plan)
    await reward(client, "data_pool-1", 4, 1.0)
    again = await client.version_rewards("train", read.cursor)
    assert ([found.version for found in again.rewards], again.missed) == ([4], 1)
    assert (await client.version_rewards("train", again.cursor)).missed == 0


async def test_a_shard_with_a_journal_says_how_many_and_keeps_canary_and_decisions(tmp_path: Path) -> None:
    opened: list[SqliteJournal] = []

    def start() -> ShardService:
        opened.append(SqliteJournal(tmp_path / "pool.sqlite", closed_kept=100))
        return ShardService(PoolPlan(limits=Limits()), "data_pool", journal=opened[-1])

    async def add(service: ShardService, uid: str) -> None:
        await asked(service, AddSteps(pack([make_step(uid, uid, reward=1.0, policy_version=3)]), channel="train"))

    service = start()
    await asked(service, Decide(decision("rollback", version=2)))
    await asked(service, Decide(decision("canary", at=2.0), CANARY, 3))
    await add(service, "a")
    read: Any = await asked(service, ReadVersionRewards("train", {}))
    await add(service, "b")
    kill(opened.pop())
    service = start()
    await add(service, "c")
    again: Any = await asked(service, ReadVersionRewards("train", {"data_pool": read.cursor}))
    assert ([found.trajectory_uid for found in again.rewards], again.missed) == (["c"], 1)
    serving = await service.serving()
    assert (serving.policy_version, serving.canary, serving.withdrawn) == (3, CANARY, (2,))
    assert await asked(service, ReadDecisions()) == [decision("rollback", version=2), decision("canary", at=2.0)]
    kill(opened.pop())


def test_a_training_loop_has_the_same_calls() -> None:
    client = LocalPool()
    pool = DataPool(client)
    pool.decide(decision("canary"), CANARY, 3)
    assert (pool.policy_version, pool.canary()) == (3, CANARY)
    assert pool.decisions() == [decision("canary")]
    assert pool.version_rewards("train").rewards == []
    assert pool.policy_status().canary == CANARY


def test_messages_are_read_by_field_name() -> None:
    for sent in (CANARY, decision("canary"), VersionReward(3, 1.0, "t")):
        assert pickle.loads(pickle.dumps(sent)) == sent
