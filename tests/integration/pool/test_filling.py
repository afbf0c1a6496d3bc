"""Scored groups and exactly filled batches over several real shards, with others filling and shards dying meanwhile."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from stepwell.errors import BadRequest, LeaseExpired
from stepwell.pool.api.leasing import LeasedGroups
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.client.exact_fill import ExactFill, fill_exactly
from stepwell.pool.client.shards import RayTransport, ShardSet
from stepwell.steps.columns import pack
from stepwell.steps.step import Exactness, Step
from tests.builders import EVERYTHING, make_group
from tests.integration.pool.conftest import actor, pid_of, started

SHARDS = 3


@pytest.fixture
def plan(tmp_path: Path) -> PoolPlan:
    return PoolPlan(shards=SHARDS, journal=str(tmp_path))


@pytest.fixture
def client(plan: PoolPlan, namespace: str) -> PoolClient:
    return started(plan, namespace)


def many_groups(count: int, sizes: tuple[int, ...] = (4,)) -> tuple[list[Step], list[Registration]]:
    groups = [make_group(f"p{n}", sizes[n % len(sizes)], ("maths", "games")[n % 2]) for n in range(count)]
    return [step for steps, _ in groups for step in steps], [wanted for _, wanteds in groups for wanted in wanteds]


async def send(client: PoolClient, count: int, sizes: tuple[int, ...] = (4,)) -> None:
    steps, registrations = many_groups(count, sizes)
    assert await client.submit_groups(steps, registrations) == [SubmitVerdict.ACCEPTED] * len(steps)


async def fill(client: PoolClient, trajectories: int, **shares: float) -> LeasedGroups | None:
    return await client.fill_batch(trajectories, channel="train", shares=shares, lease=60.0)


async def test_groups_sent_together_reach_their_shards_and_are_counted_together(
    client: PoolClient, plan: PoolPlan, namespace: str
) -> None:
    await send(client, 30, sizes=(2, 2, 4))
    held = [await actor(name, namespace).backlog.remote("train") for name in plan.shard_names()]
    assert all(backlog.total_groups for backlog in held)
    backlog = await client.ready_groups("train")
    assert backlog.groups == {"maths": {2: 10, 4: 5}, "games": {2: 10, 4: 5}}
    steps, registrations = many_groups(31, sizes=(2, 2, 4))
    verdicts = await client.submit_columns(pack(steps), registrations)
    assert verdicts == [SubmitVerdict.DUPLICATE] * 80 + [SubmitVerdict.ACCEPTED] * 2


async def test_a_batch_is_filled_exactly_from_all_shards_oldest_first_and_by_shares(client: PoolClient) -> None:
    for n in range(12):
        steps, registrations = make_group(f"p{n}", 4, "maths" if n < 9 else "games")
        await client.submit_groups(steps, registrations)
    filled = await fill(client, 24, games=0.3)
    assert filled is not None
    assert filled.group_sizes == [4] * 6
    assert filled.columns.prompt_uids[::4] == ["p0", "p1", "p2", "p3", "p9", "p10"]
    assert filled.sources == ["maths"] * 4 + ["games"] * 2
    assert {shard for shard, _ in filled.leases} == {"data_pool", "data_pool-1", "data_pool-2"}
    await client.nack(filled)
    again = await fill(client, 24, games=0.3)
    assert again is not None
    assert again.columns.uids == filled.columns.uids
    assert again.attempts == [1] * 6
    await client.ack(again)
    assert await fill(client, 23) is None
    assert await fill(client, 28) is None
    assert (await client.stats()).channels["train"].shipped.steps == 24


async def test_many_who_fill_at_once_get_every_group_once(client: PoolClient) -> None:
    await send(client, 96, sizes=(2, 3, 4))
    got: list[LeasedGroups] = []

    async def consume() -> None:
        while True:
            filled = await fill(client, 12)
            if filled is not None:
                assert len(set(filled.columns.trajectory_uids)) == len(filled.columns) == 12
                assert filled.attempts == [0] * len(filled.sources), "what was taken in vain counts as never taken"
                got.append(filled)
                await client.ack(filled)
            elif not (await client.ready_groups("train")).total_groups:
                return

    await asyncio.gather(*(consume() for _ in range(6)))
    uids = [uid for filled in got for uid in filled.columns.uids]
    assert len(uids) == len(set(uids)) == 96 * 3
    stats = await client.stats()
    assert (stats.leases, stats.channels["train"].shipped.steps) == (0, 96 * 3)


async def test_shards_that_are_killed_meanwhile_lose_nothing(
    client: PoolClient, plan: PoolPlan, namespace: str
) -> None:
    await send(client, 24)
    first = await fill(client, 16)
    assert first is not None
    victims = {name: pid_of(name, namespace) for name in plan.shard_names()[1:]}
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)
    late_steps, late_registrations = many_groups(27)
    verdicts = await client.submit_groups(late_steps, late_registrations)
    assert verdicts == [SubmitVerdict.DUPLICATE] * 96 + [SubmitVerdict.ACCEPTED] * 12
    await client.ack(first)
    got = [first]
    while (await client.ready_groups("train")).total_groups:
        filled = await fill(client, 4)
        if filled is not None:
            got.append(filled)
            await client.ack(filled)
    uids = [uid for filled in got for uid in filled.columns.uids]
    assert sorted(uids) == sorted(step.uid for step in late_steps)


class DeadlyTransport(RayTransport):
    """Kills each shard once, just before it gives its part, or just after, so that its answer is lost."""

    def __init__(self, namespace: str, *, before: bool) -> None:
        super().__init__("data_pool", namespace)
        self._before = before
        self.killed: set[str] = set()

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method in ("take_offers", "fill") and shard not in self.killed:
            self.killed.add(shard)
            if not self._before:
                assert await super().call(shard, method, args, kwargs) is not None
            os.kill(pid_of(shard, self._namespace), signal.SIGKILL)
        return await super().call(shard, method, args, kwargs)


@pytest.mark.parametrize("before", [True, False])
async def test_a_shard_that_is_killed_while_its_part_is_taken_gives_it_all_the_same(
    client: PoolClient, plan: PoolPlan, namespace: str, before: bool
) -> None:
    await send(client, 24)
    transport = DeadlyTransport(namespace, before=before)
    wanted = ExactFill(trajectories=96, channel="train", shares={}, lease=60.0, step_filter=EVERYTHING)
    filled = await fill_exactly(ShardSet("data_pool", transport), wanted)
    assert transport.killed == set(plan.shard_names())
    assert filled is not None
    assert sorted(filled.columns.uids) == sorted(step.uid for step in many_groups(24)[0])
    assert filled.attempts == [0] * 24
    await client.ack(filled)
    assert (await client.stats()).channels["train"].shipped.steps == 96


@pytest.mark.parametrize("before", [True, False])
async def test_a_single_shard_fills_a_batch_by_itself_also_when_it_is_killed_meanwhile(
    tmp_path: Path, namespace: str, before: bool
) -> None:
    client = started(PoolPlan(shards=1, journal=str(tmp_path)), namespace)
    await send(client, 6)
    assert await fill(client, 28) is None
    transport = DeadlyTransport(namespace, before=before)
    wanted = ExactFill(trajectories=12, channel="train", shares={"games": 0.9}, lease=60.0, step_filter=EVERYTHING)
    filled = await fill_exactly(ShardSet("data_pool", transport), wanted)
    assert transport.killed == {"data_pool"}
    assert filled is not None
    assert (filled.sources, filled.attempts) == (["games"] * 3, [0] * 3)
    await client.ack(filled)
    assert (await client.ready_groups("train")).total_trajectories == 12


async def test_a_shard_that_is_away_keeps_no_one_from_the_others(
    client: PoolClient, plan: PoolPlan, namespace: str
) -> None:
    await send(client, 24)
    left = {name: await actor(name, namespace).backlog.remote("train") for name in plan.shard_names()}
    ray.kill(actor("data_pool-2", namespace))
    there = sum(left[name].total_groups for name in ("data_pool", "data_pool-1"))
    filled = await fill(client, 4 * there)
    assert filled is not None
    assert {shard for shard, _ in filled.leases} == {"data_pool", "data_pool-1"}


async def test_a_lease_that_ran_out_is_told_and_a_clear_spares_what_is_under_lease(client: PoolClient) -> None:
    await send(client, 6)
    short = await client.fill_batch(4, channel="train", shares={}, lease=0.05)
    assert short is not None

    async def is_back() -> bool:
        return (await client.ready_groups("train")).total_groups == 6

    async with asyncio.timeout(30):
        while not await is_back():
            await asyncio.sleep(0.01)
    with pytest.raises(LeaseExpired):
        await client.ack(short)
    kept = await fill(client, 8)
    assert kept is not None
    assert await client.clear("train") == 4
    assert (await client.ready_groups("train")).groups == {}
    await client.nack(kept)
    assert (await client.ready_groups("train")).total_groups == 2
    assert (await client.stats()).channels["train"].dropped["cleared"].steps == 16


async def test_the_gate_and_wrong_requests(client: PoolClient) -> None:
    steps, registrations = make_group("p", 2, exactness=Exactness.RETOKENIZED)
    await client.submit_groups(steps, registrations)
    steps, registrations = make_group("q", 2, exactness=Exactness.SUBMITTED)
    await client.submit_groups(steps, registrations)
    filled = await client.fill_batch(2, channel="train", shares={}, lease=60.0, min_exactness="submitted")
    assert filled is not None
    assert filled.columns.prompt_uids == ["q", "q"]
    with pytest.raises(BadRequest, match="perfect"):
        await client.fill_batch(2, channel="train", shares={}, lease=60.0, min_exactness="perfect")
    with pytest.raises(BadRequest, match="at least one trajectory, not 0"):
        await fill(client, 0)


async def test_a_ray_trainer_gets_the_same_groups_with_their_sources(client: PoolClient) -> None:
    await send(client, 4)
    batch = await asyncio.to_thread(DataPool(client).fetch_batch, 4)
    sources = dict(zip(batch.columns.prompt_uids[::4], batch.sources, strict=True))
    assert sources == {"p0": "maths", "p1": "games", "p2": "maths", "p3": "games"}
    assert batch.rewards_T.tolist() == [1.0] * 16
