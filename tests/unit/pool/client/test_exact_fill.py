"""Scored groups and exactly filled batches over several shards. tests/integration/pool kills the shards meanwhile."""

import asyncio

import pytest

from rig.builders import make_group
from rig.local_pool import LocalPool
from stepwell.errors import BadRequest, LeaseExpired, PoolUnavailable
from stepwell.pool.api.leasing import LeasedGroups
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.steps.columns import pack
from stepwell.steps.step import Exactness, Step


@pytest.fixture
def client() -> LocalPool:
    return LocalPool(shards=3)


def many_groups(count: int, sizes: tuple[int, ...] = (4,)) -> tuple[list[Step], list[Registration]]:
    groups = [make_group(f"p{n}", sizes[n % len(sizes)], ("maths", "games")[n % 2]) for n in range(count)]
    return [step for steps, _ in groups for step in steps], [wanted for _, wanteds in groups for wanted in wanteds]


async def send(client: LocalPool, count: int, sizes: tuple[int, ...] = (4,)) -> None:
    steps, registrations = many_groups(count, sizes)
    assert await client.submit_groups(steps, registrations) == [SubmitVerdict.ACCEPTED] * len(steps)


async def fill(client: LocalPool, trajectories: int, **shares: float) -> LeasedGroups | None:
    return await client.fill_batch(trajectories, channel="train", shares=shares, lease=60.0)


async def test_groups_sent_together_reach_their_shards_and_are_counted_together(client: LocalPool) -> None:
    await send(client, 30, sizes=(2, 2, 4))
    services = client.transport.services.values()
    assert all([(await service.ready_groups("train")).total_groups for service in services])
    backlog = await client.ready_groups("train")
    assert backlog.groups == {"maths": {2: 10, 4: 5}, "games": {2: 10, 4: 5}}
    steps, registrations = many_groups(31, sizes=(2, 2, 4))
    verdicts = await client.submit_columns(pack(steps), registrations)
    assert verdicts == [SubmitVerdict.DUPLICATE] * 80 + [SubmitVerdict.ACCEPTED] * 2


async def test_a_batch_is_filled_exactly_from_all_shards_oldest_first_and_by_shares(client: LocalPool) -> None:
    for n in range(12):
        client.advance_to(float(n))
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


async def test_many_who_fill_at_once_get_every_group_once(client: LocalPool) -> None:
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


async def test_a_shard_that_is_away_keeps_no_one_from_the_others(client: LocalPool) -> None:
    await send(client, 24)
    left = {name: await service.ready_groups("train") for name, service in client.transport.services.items()}
    client.transport.shards_away.add("data_pool-2")
    there = sum(left[name].total_groups for name in ("data_pool", "data_pool-1"))
    filled = await fill(client, 4 * there)
    assert filled is not None
    assert {shard for shard, _ in filled.leases} == {"data_pool", "data_pool-1"}


async def test_a_lease_that_ran_out_is_told_and_a_clear_spares_what_is_under_lease(client: LocalPool) -> None:
    await send(client, 6)
    short = await client.fill_batch(4, channel="train", shares={}, lease=0.05)
    assert short is not None
    client.advance_to(1.0)
    with pytest.raises(LeaseExpired):
        await client.ack(short)
    kept = await fill(client, 8)
    assert kept is not None
    assert await client.clear("train") == 4
    assert (await client.ready_groups("train")).groups == {}
    await client.nack(kept)
    assert (await client.ready_groups("train")).total_groups == 2
    assert (await client.stats()).channels["train"].dropped["cleared"].steps == 16


async def test_the_step_filter_and_wrong_requests(client: LocalPool) -> None:
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


async def test_a_trainer_gets_the_same_groups_with_their_sources(client: LocalPool) -> None:
    await send(client, 4)
    batch = await client.fetch_batch(4)
    sources = dict(zip(batch.columns.prompt_uids[::4], batch.sources, strict=True))
    assert sources == {"p0": "maths", "p1": "games", "p2": "maths", "p3": "games"}
    assert batch.rewards_T.tolist() == [1.0] * 16


async def test_if_no_shard_answers_the_pool_is_unavailable(client: LocalPool) -> None:
    await send(client, 3)
    client.transport.shards_away.update(client.plan.shard_names())
    with pytest.raises(PoolUnavailable, match="no offers; it is away"):
        await fill(client, 4)
