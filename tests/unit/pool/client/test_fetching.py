"""Batches from several shards. tests/integration/pool has shards that are killed."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool, LocalTransport
from rig.waiting import until
from stepwell.errors import FetchTimeout, LeaseExpired
from stepwell.pool.api.leasing import Order, batch_of_lease
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.sessions import SESSION, session_metadata
from stepwell.pool.client.fetching import TAKE_PATIENCE
from stepwell.steps.step import Exactness

SHARDS = 4
seconds = count(1)


@pytest.fixture
def client() -> LocalPool:
    return LocalPool(shards=SHARDS, history_size=8)


async def rollouts(client: LocalPool, *prompts: str) -> None:
    """One after the other, a second apart."""
    for prompt in prompts:
        uid = f"t-{prompt}"
        client.advance_to(float(next(seconds)))
        await client.register_trajectory(Registration(uid, prompt))
        assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
        assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def test_steps_of_many_prompts_are_spread_over_the_shards_and_counted_together(client: LocalPool) -> None:
    prompts = [f"p{n}" for n in range(20)]
    steps = [make_step(f"t-{p}", p, step_index=0, is_last=True, prompt_ids=[n + 1]) for n, p in enumerate(prompts)]
    verdicts = await client.submit_steps([*steps, steps[3]], channel="train")
    assert verdicts == [SubmitVerdict.ACCEPTED] * 20 + [SubmitVerdict.DUPLICATE]
    for index, name in enumerate(client.plan.shard_names()):
        stats = await client.transport.services[name].stats()
        assert stats.channels["train"].groups == sum(Layout(1, SHARDS).owner(p) == index for p in prompts) > 0
    assert (await client.stats()).channels["train"].ready_groups == 20
    assert sorted((await client.fetch_batch(20)).columns.prompt_uids) == sorted(prompts)


async def test_the_oldest_groups_of_all_shards_go_first(client: LocalPool) -> None:
    prompts = [f"p{n}" for n in range(12)]
    await rollouts(client, *prompts)
    assert (await client.fetch_batch(6)).columns.prompt_uids == prompts[:6]
    assert (await client.fetch_batch(6)).columns.prompt_uids == prompts[6:]


async def test_a_fetch_waits_for_the_last_group_on_whichever_shard(client: LocalPool) -> None:
    await rollouts(client, "p0", "p1", "p2")
    fetching = asyncio.create_task(client.fetch_batch(4, timeout=20))
    await asyncio.sleep(0)
    await rollouts(client, "p3")
    assert len(await fetching) == 4


async def test_a_fetch_that_times_out_takes_nothing_and_names_every_shard(client: LocalPool) -> None:
    await rollouts(client, "p0", "p1")
    with pytest.raises(FetchTimeout, match=r"waited 0.05 s over 4 shards. data_pool: .*; data_pool-3: "):
        await client.fetch_batch(3, timeout=0.05)
    assert len(await client.fetch_batch(2)) == 2


async def test_in_strict_order_an_unfinished_group_on_one_shard_holds_all_shards(client: LocalPool) -> None:
    await rollouts(client, "p0", "p1")
    client.advance_to(float(next(seconds)))
    await client.register_trajectory(Registration("slow", "p2"))
    await rollouts(client, "p3", "p4", "p5")
    assert (await client.fetch_batch(2, order="strict")).columns.prompt_uids == ["p0", "p1"]
    with pytest.raises(FetchTimeout, match="'p2', has 0 of 1 trajectories complete"):
        await client.fetch_batch(1, order="strict", timeout=0.05)
    await client.submit_steps([make_step("slow", "p2")])
    await client.complete_trajectory("slow", "p2", None)
    assert (await client.fetch_batch(4, order="strict")).columns.prompt_uids == ["p2", "p3", "p4", "p5"]


async def test_a_fetch_without_an_order_has_the_pools() -> None:
    pool = LocalPool(order=Order.STRICT)
    await pool.register_trajectory(Registration("slow", "old"))
    await rollouts(pool, "young")
    with pytest.raises(FetchTimeout, match="'old', has 0 of 1 trajectories complete and 1 started and nothing may"):
        await pool.fetch_batch(1, timeout=0.05)
    assert await pool.fetch_ready(1, lease=60.0) == []
    assert (await pool.fetch_batch(1, order="oldest_ready")).columns.prompt_uids == ["young"]


async def test_a_shard_that_is_away_is_passed_over_except_in_strict_order(client: LocalPool) -> None:
    prompts = [f"p{n}" for n in range(12)]
    await rollouts(client, *prompts)
    client.transport.shards_away.add("data_pool-1")
    there = [prompt for prompt in prompts if Layout(1, SHARDS).owner(prompt) != 1]
    with pytest.raises(FetchTimeout):
        await asyncio.gather(client.fetch_batch(1, order="strict", timeout=0.05), _come_back(client, 0.3))
    client.transport.shards_away.add("data_pool-1")
    assert (await client.fetch_batch(len(there))).columns.prompt_uids == there


class StoppingTransport(LocalTransport):
    """Its second shard stops while something is taken from it."""

    has_stopped = False
    puts_back = 0

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if (shard, method) == ("data_pool-1", "take") and not self.has_stopped:
            self.has_stopped = True
            self.shards_stopped.add(shard)
        self.puts_back += method == "put_back"
        return await super().call(shard, method, args, kwargs)


@pytest.fixture
def stopping() -> LocalPool:
    return LocalPool(shards=SHARDS, transport=StoppingTransport)


async def test_a_shard_that_stops_while_it_is_taken_from_holds_up_no_group_of_the_others(stopping: LocalPool) -> None:
    first = next(p for n in count() if Layout(1, SHARDS).owner(p := f"p{n}") == 1)
    then = next(p for n in count() if Layout(1, SHARDS).owner(p := f"p{n}") != 1)
    await rollouts(stopping, first, then)
    async with asyncio.timeout(4.0):
        assert (await stopping.fetch_batch(1)).columns.prompt_uids == [then]
    stopping.transport.shards_stopped.clear()
    assert (await stopping.fetch_batch(1)).columns.prompt_uids == [first], "it is put back, and its lease is not over"


async def test_what_a_shard_hands_out_late_is_used_if_it_is_still_missing(stopping: LocalPool) -> None:
    prompt = next(p for n in count() if Layout(1, SHARDS).owner(p := f"p{n}") == 1)
    await rollouts(stopping, prompt)
    fetching = asyncio.create_task(stopping.fetch_batch(1, lease=60.0))
    while not stopping.transport.has_stopped:
        await asyncio.sleep(0)
    await asyncio.wait([fetching], timeout=3 * TAKE_PATIENCE)
    stopping.transport.shards_stopped.clear()
    assert (await fetching).columns.prompt_uids == [prompt]
    assert (await stopping.stats()).leases == 1


def prompt_of(shard: int) -> str:
    """A prompt whose group that shard opens."""
    return next(p for n in count() if Layout(1, SHARDS).owner(p := f"p{n}") == shard)


async def test_a_batch_without_the_shard_that_fell_silent_is_acknowledged_without_it(stopping: LocalPool) -> None:
    first, *others = [prompt_of(shard) for shard in (1, 0, 2)]
    await rollouts(stopping, first, *others)
    async with asyncio.timeout(20.0):
        batch = await stopping.fetch_batch(2, lease=60.0)
        assert batch.columns.prompt_uids == others
        await stopping.ack(batch)
    stopping.transport.shards_stopped.clear()
    assert (await stopping.fetch_batch(1)).columns.prompt_uids == [first]
    assert (await stopping.stats()).leases == 0


async def test_a_part_that_comes_late_joins_no_batch_that_was_named_anew(stopping: LocalPool) -> None:
    """The shard that fell silent answers while the others' parts are taken again."""
    first, *others = [prompt_of(shard) for shard in (1, 0, 2)]
    await rollouts(stopping, first, *others)
    fetching = asyncio.create_task(stopping.fetch_batch(2, lease=60.0))
    await until(lambda: stopping.transport.puts_back > 0, "the parts that are put back")
    stopping.transport.shards_stopped.clear()
    batch = await fetching
    assert len({batch_of_lease(lease) for _, lease in batch.leases}) == 1, "it is acknowledged as one"
    await stopping.ack(batch)
    left = {first, *others} - set(batch.columns.prompt_uids)
    assert {*(await stopping.fetch_batch(1)).columns.prompt_uids} == left


async def _come_back(client: LocalPool, after: float) -> None:
    """In time for the fetch to name what each shard waits for."""
    await asyncio.sleep(after)
    client.transport.shards_away.clear()


async def test_a_lease_that_ran_out_is_told_at_acknowledgement(client: LocalPool) -> None:
    await rollouts(client, "p0")
    late = await client.fetch_batch(1, lease=10)
    client.advance_to(float(next(seconds)) + 10)
    again = await client.fetch_batch(1, lease=60)
    with pytest.raises(LeaseExpired, match="ask for a longer one"):
        await client.ack(late)
    await client.ack(again)
    assert (await client.stats()).channels["train"].shipped.steps == 1


async def test_a_lease_that_ran_out_is_over_for_whoever_only_looks(client: LocalPool) -> None:
    await rollouts(client, "p0")
    await client.fetch_batch(1, lease=10)
    assert (await client.stats()).leases == 1
    client.advance_to(float(next(seconds)) + 10)
    stats = await client.stats()
    assert (stats.leases, stats.channels["train"].ready_groups) == (0, 1)


async def test_trained_groups_can_be_mixed_into_later_batches(client: LocalPool) -> None:
    await rollouts(client, *(f"p{n}" for n in range(24)))
    await client.fetch_batch(16)
    batch = await client.fetch_batch(8, history=0.5)
    assert 0 < batch.from_history_G.sum() <= 4


async def test_the_step_filter_holds_on_every_shard_and_what_it_left_out_is_counted_together(client: LocalPool) -> None:
    async def send(prompt: str, **second: Any) -> None:
        """One step that is always wanted, and one more."""
        await client.register_trajectory(Registration(f"t-{prompt}", prompt))
        steps = [make_step(f"t-{prompt}", prompt, uid=str(n), started_at=n, **(second if n else {})) for n in range(2)]
        assert await client.submit_steps(steps) == [SubmitVerdict.ACCEPTED] * 2
        await client.complete_trajectory(f"t-{prompt}", prompt, 1.0)

    async def send_all(names: str) -> None:
        for n in range(8):
            await send(f"{names}-greedy-{n}", untrainable="greedy: temperature is 0")
            await send(f"{names}-again-{n}", exactness=Exactness.RETOKENIZED)

    await send_all("first")
    batch = await client.fetch_batch(16)
    assert batch.columns.uids == ["0"] * 16
    assert batch.rewards_T.tolist() == [1.0] * 16
    left_out = (await client.stats()).channels["train"].left_out
    assert {kind: count.steps for kind, count in left_out.items()} == {"exactness": 8, "greedy": 8}
    await send_all("second")
    assert len((await client.fetch_batch(16, min_exactness="retokenized", untrainable=True)).columns) == 32
    await send_all("third")
    with pytest.raises(FetchTimeout, match="left out so far: .* exactness"):
        await client.fetch_batch(1, min_exactness="engine", timeout=0.1)
    assert (await client.stats()).channels["train"].held.steps == 0


async def test_every_consumer_gets_its_own_groups() -> None:
    client = LocalPool()
    fetches = [asyncio.create_task(client.fetch_batch(1, timeout=20.0)) for _ in range(20)]
    await rollouts(client, *(f"p{i}" for i in range(20)))
    taken = [batch.columns.prompt_uids[0] for batch in await asyncio.gather(*fetches)]
    assert sorted(taken) == sorted(f"p{i}" for i in range(20))


async def sessions(client: LocalPool, *users: str) -> None:
    """One after the other, each with one step; they are spread over the shards."""
    for user in users:
        at = next(seconds)
        uid, prompt = f"{user}-{at}", f"p{at}"
        client.advance_to(float(at))
        metadata = {SESSION: session_metadata(uid, user)} if user else {}
        await client.register_trajectory(Registration(uid, prompt, metadata=metadata))
        assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
        assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


@pytest.mark.parametrize("shards", [1, SHARDS])
async def test_the_share_of_a_user_is_that_of_the_whole_batch(shards: int) -> None:
    client = LocalPool(shards=shards, max_share_per_user=0.25)
    await sessions(client, *["ann"] * 12, *["bob"] * 3, *[""] * 8)
    batch = await client.fetch_batch(8)
    assert Counter(uid.partition("-")[0] for uid in batch.columns.trajectory_uids) == {"ann": 2, "bob": 2, "": 4}


@pytest.mark.parametrize("shards", [1, SHARDS])
async def test_a_fetch_that_one_user_could_fill_waits_for_others_and_says_so(shards: int) -> None:
    client = LocalPool(shards=shards, max_share_per_user=0.25)
    await sessions(client, *["ann"] * 12)
    with pytest.raises(FetchTimeout) as raised:
        await client.fetch_batch(8, timeout=0.05)
    held_back = re.findall(r"(\d+) ready groups are held back by --max-share-per-user 0.25", str(raised.value))
    assert sum(map(int, held_back)) == 10
    fetching = asyncio.create_task(client.fetch_batch(8, timeout=20))
    await asyncio.sleep(0)
    await sessions(client, *["bob"] * 3, *[""] * 4)
    batch = await fetching
    assert Counter(uid.partition("-")[0] for uid in batch.columns.trajectory_uids) == {"ann": 2, "bob": 2, "": 4}
