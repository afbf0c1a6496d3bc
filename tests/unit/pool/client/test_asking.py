"""Operations of this file's own: a client and a shard run what they have never heard of."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from stepwell.pool.slices.producing import ChannelIfOpen, Register

from rig.local_pool import LocalPool
from stepwell.common.message_format import message
from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.transport import SERVING, UNSEEN
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute, TrajectoryOperation
from stepwell.pool.shard.shard import Shard
from stepwell.pool.slices.policy import PauseChannel
from tests.unit.survival.test_shards_change_while_the_pool_runs import change

SHARDS = 3
PROMPTS = [f"p{n}" for n in range(30)]


@message
@dataclass(frozen=True, slots=True)
class CountOpen(MergedOperation[int, tuple[int, tuple[str, ...]]]):
    """How many trajectories are open, and which shards did not tell."""

    changes = False

    def run(self, shard: Shard) -> int:
        return len(shard.pool.state.trajectories)

    def merge(self, parts: Mapping[str, int], missing: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        return sum(parts.values()), missing


@message
@dataclass(frozen=True, slots=True)
class NameShard(TrajectoryOperation[str]):
    def run(self, shard: Shard) -> str:
        return shard.transactions.name


@message
@dataclass(frozen=True, slots=True)
class Refuse(Operation[None]):
    text: str
    route = ShardRoute.FIRST

    def run(self, shard: Shard) -> None:
        raise BadRequest(self.text)


async def test_answers_of_all_shards_are_merged_and_those_that_are_away_are_named() -> None:
    pool = LocalPool(shards=SHARDS, part_timeout=0.05)
    for prompt in PROMPTS:
        await pool.register_trajectory(Registration(prompt, prompt))
    assert await pool.ask(CountOpen()) == (len(PROMPTS), ())
    away = next(name for name in await pool.shards.names() if name != pool.plan.name)
    held = len(pool.transport.services[away].pool.state.trajectories)
    pool.transport.shards_stopped.add(away)
    assert await pool.ask(CountOpen()) == (len(PROMPTS) - held, (away,))
    pool.transport.shards_stopped.clear()


async def test_an_operation_about_a_trajectory_goes_to_the_shard_of_its_group_also_after_a_change_of_shards() -> None:
    pool = LocalPool(shards=1)
    for prompt in PROMPTS[:10]:
        await pool.register_trajectory(Registration(prompt, prompt))
    plan = await change(pool, SHARDS)
    for prompt in PROMPTS[:10]:
        assert await pool.ask(NameShard(prompt, prompt)) == pool.plan.name, "it stays where it was opened"
    for prompt in PROMPTS[10:]:
        await pool.register_trajectory(Registration(prompt, prompt))
        assert await pool.ask(NameShard(prompt, prompt)) == plan.owners(prompt)[-1]


async def test_each_operation_of_a_message_is_refused_for_itself() -> None:
    pool = LocalPool()
    shard = pool.transport.services[pool.plan.name]
    answers = await shard.run(
        [Refuse("no"), Register(Registration("t", "p")), Refuse("never"), ChannelIfOpen("t", "p")]
    )
    assert [str(answer) for answer in answers] == ["no", "None", "never", "train"]
    told = await asyncio.gather(pool.ask(Refuse("a")), pool.ask(CountOpen()), return_exceptions=True)
    assert isinstance(told[0], BadRequest)
    assert told[1] == (1, ())


async def test_a_bug_in_one_operation_is_its_own() -> None:
    pool = LocalPool()
    with pytest.raises(NotImplementedError):
        await pool.ask(Unfinished("t", "p"))
    assert await pool.ask(NameShard("t", "p")) == pool.plan.name


@message
@dataclass(frozen=True, slots=True)
class Unfinished(TrajectoryOperation[str]):
    """It has no `run`."""


async def test_whoever_waits_for_what_serves_a_channel_is_woken_by_the_operation_that_changes_it() -> None:
    pool = LocalPool()
    shard = pool.transport.services[pool.plan.name]
    (known,) = (await shard.wait_news("test", {SERVING: UNSEEN}, 0.0)).values()
    waiting = asyncio.create_task(shard.wait_news("test", {SERVING: known.revision}, 30.0))
    await asyncio.sleep(0)
    paused = await pool.ask(PauseChannel("train", True))
    assert paused.channel("train").paused
    async with asyncio.timeout(5):
        assert (await waiting)[SERVING].value == paused


async def test_an_operation_waits_no_longer_than_it_is_given() -> None:
    pool = LocalPool()
    pool.transport.shards_stopped.add(pool.plan.name)
    with pytest.raises(PoolUnavailable, match=r"no answer within 0\.05 s"):
        await pool.ask(NameShard("t", "p"), timeout=0.05)
    with pytest.raises(PoolUnavailable, match=r"no plan within 0\.05 s"):
        await pool.ask(CountOpen(), timeout=0.05)
    pool.transport.shards_stopped.clear()
