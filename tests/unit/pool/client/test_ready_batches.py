import asyncio
from typing import NamedTuple

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.errors import BadRequest, Conflict, LeaseExpired
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client.batch import Batch

SHARDS = 2
LEASE = 600.0


class Leases(NamedTuple):
    leases: tuple[tuple[str, str], ...]


async def pool_with(groups: int, shards: int = SHARDS) -> LocalPool:
    pool = LocalPool(shards=shards, part_timeout=0.1, timeout=0.2)
    for number in range(groups):
        pool.advance_to(float(number))
        uid, prompt = f"t{number}", f"p{number}"
        await pool.register_trajectory(Registration(uid, prompt))
        assert await pool.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
        assert await pool.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED
    return pool


def leased(pool: LocalPool) -> int:
    return sum(len(service.pool.state.leases) for service in pool.transport.services.values())


def queued(pool: LocalPool) -> int:
    channels = [service.pool.state.channels.get("train") for service in pool.transport.services.values()]
    return sum(len(channel.groups) for channel in channels if channel is not None)


def prompts(batches: list[Batch]) -> list[str]:
    return [step.prompt_uid for batch in batches for step in batch.steps()]


def together(batches: list[Batch]) -> Leases:
    return Leases(tuple(lease for batch in batches for lease in batch.leases))


async def test_each_ready_group_is_a_batch_with_a_lease_of_its_own() -> None:
    pool = await pool_with(3, shards=1)
    batches = await pool.fetch_ready(5, lease=LEASE)
    assert prompts(batches) == ["p0", "p1", "p2"], "fewer than asked for, oldest first"
    await pool.ack(batches[1])
    await pool.nack(batches[2])
    assert (leased(pool), queued(pool)) == (1, 1)
    assert prompts(await pool.fetch_ready(5, lease=LEASE)) == ["p2"]
    await pool.ack(batches[0])
    assert (leased(pool), queued(pool)) == (1, 0)


async def test_no_more_are_taken_than_asked_for_and_nothing_is_waited_for() -> None:
    pool = await pool_with(8)
    assert len(await pool.fetch_ready(3, lease=LEASE)) == leased(pool) <= 3
    while await pool.fetch_ready(4, lease=LEASE):
        pass
    assert leased(pool) == 8
    with pytest.raises(BadRequest, match="not 0"):
        await pool.fetch_ready(0, lease=LEASE)


async def test_groups_of_several_shards_come_in_the_order_of_their_age() -> None:
    pool = await pool_with(12)
    found = prompts(await pool.fetch_ready(24, lease=LEASE))
    assert found == [f"p{number}" for number in range(12)]


async def test_many_acknowledgements_are_one_call_to_each_shard() -> None:
    pool = await pool_with(12)
    batches = await pool.fetch_ready(24, lease=LEASE)
    await pool.ack(together(batches))
    assert pool.transport.takes == ["take_several"] * SHARDS + ["ack_several"] * SHARDS
    assert (leased(pool), queued(pool)) == (0, 0)


async def test_of_many_acknowledgements_one_that_is_late_is_told_and_the_others_count() -> None:
    pool = await pool_with(3, shards=1)
    late = await pool.fetch_ready(1, lease=1.0)
    in_time = await pool.fetch_ready(2, lease=LEASE)
    pool.advance_to(100.0)
    with pytest.raises(LeaseExpired):
        await pool.ack(together([*late, *in_time]))
    assert (leased(pool), queued(pool)) == (0, 1)
    assert prompts(await pool.fetch_ready(3, lease=LEASE)) == ["p0"]


@pytest.mark.parametrize("how", ["shards_away", "shards_stopped"])
async def test_a_shard_that_does_not_answer_has_none_and_loses_none(how: str) -> None:
    pool = await pool_with(12)
    await pool.fetch_ready(1, lease=LEASE)  # it knows the plan
    getattr(pool.transport, how).add("data_pool-1")
    await pool.fetch_ready(24, lease=LEASE)
    getattr(pool.transport, how).clear()
    async with asyncio.timeout(10.0):
        while leased(pool) < 12:
            await pool.fetch_ready(24, lease=LEASE)


async def test_a_request_that_a_channel_refuses_leaves_nothing_leased() -> None:
    pool = await pool_with(12)
    await pool.nack(await pool.fetch_batch(1, lease=LEASE, unit="trajectories"))
    with pytest.raises(Conflict, match="consumed by trajectories"):
        await pool.fetch_ready(24, lease=LEASE)
    await until(lambda: leased(pool) == 0, "all to return")


async def test_a_call_that_is_given_up_returns_what_it_had_taken() -> None:
    pool = await pool_with(12)
    await pool.shards.plan()
    pool.transport.shards_stopped.add("data_pool-1")
    fetching = asyncio.create_task(pool.fetch_ready(24, lease=LEASE))
    while not leased(pool):
        await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    pool.transport.shards_stopped.clear()
    await until(lambda: leased(pool) == 0, "all to return")
    assert queued(pool) == 12
