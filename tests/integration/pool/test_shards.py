"""A DataPool of several actors, with journals: leases, order, and shards that are killed."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from stepwell.errors import FetchTimeout, LeaseExpired, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.client.shards import shard_of
from stepwell.pool.shard.actor import start_pool
from stepwell.steps.step import Exactness
from tests.builders import make_step
from tests.integration.pool.conftest import actor, pid_of, started
from tests.rig.waiting import wait_until

SHARDS = 4


@pytest.fixture
def plan(tmp_path: Path) -> PoolPlan:
    return PoolPlan(shards=SHARDS, journal=str(tmp_path), limits=Limits(history_size=8))


@pytest.fixture
def client(plan: PoolPlan, namespace: str) -> PoolClient:
    return started(plan, namespace)


@pytest.fixture
def pool(client: PoolClient) -> DataPool:
    return DataPool(client)


async def rollout(client: PoolClient, prompt: str, uid: str | None = None) -> None:
    uid = uid or f"t-{prompt}"
    await client.register_trajectory(Registration(uid, prompt))
    assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


def rollouts(client: PoolClient, *prompts: str) -> None:
    async def all_of_them() -> None:
        for prompt in prompts:
            await rollout(client, prompt)

    asyncio.run(all_of_them())


def test_steps_of_many_prompts_are_spread_over_the_shards_and_counted_together(
    client: PoolClient, pool: DataPool, plan: PoolPlan, namespace: str
) -> None:
    prompts = [f"p{n}" for n in range(20)]
    steps = [make_step(f"t-{p}", p, step_index=0, is_last=True, prompt_ids=[n + 1]) for n, p in enumerate(prompts)]
    verdicts = asyncio.run(client.submit_steps([*steps, steps[3]], channel="train"))
    assert verdicts == [SubmitVerdict.ACCEPTED] * 20 + [SubmitVerdict.DUPLICATE]
    for place, name in enumerate(plan.shard_names()):
        stats: PoolStats = ray.get(actor(name, namespace).stats.remote())
        assert stats.channels["train"].groups == sum(shard_of(p, SHARDS) == place for p in prompts) > 0
    assert pool.stats().channels["train"].ready_groups == 20
    assert sorted(pool.fetch_batch(20).columns.prompt_uids) == sorted(prompts)


def test_the_oldest_groups_of_all_shards_go_first(client: PoolClient, pool: DataPool) -> None:
    prompts = [f"p{n}" for n in range(12)]
    rollouts(client, *prompts)
    assert set(pool.fetch_batch(6).columns.prompt_uids) == set(prompts[:6])
    assert set(pool.fetch_batch(6).columns.prompt_uids) == set(prompts[6:])


def test_a_fetch_waits_for_the_last_group_on_whichever_shard(client: PoolClient, pool: DataPool) -> None:
    rollouts(client, "p0", "p1", "p2")
    timer = threading.Timer(0.5, lambda: rollouts(client, "p3"))
    timer.start()
    assert len(pool.fetch_batch(4, timeout=20)) == 4
    timer.join()


def test_a_fetch_that_times_out_takes_nothing_and_names_every_shard(client: PoolClient, pool: DataPool) -> None:
    rollouts(client, "p0", "p1")
    with pytest.raises(FetchTimeout, match=r"waited 0.2 s over 4 shards. data_pool: .*; data_pool-3: "):
        pool.fetch_batch(3, timeout=0.2)
    assert len(pool.fetch_batch(2)) == 2


def test_in_strict_order_an_unfinished_group_on_one_shard_holds_all_shards(client: PoolClient, pool: DataPool) -> None:
    rollouts(client, "p0", "p1")
    asyncio.run(client.register_trajectory(Registration("slow", "p2")))
    rollouts(client, "p3", "p4", "p5")
    assert pool.fetch_batch(2, order="strict").columns.prompt_uids == ["p0", "p1"]
    with pytest.raises(FetchTimeout, match="'p2', has 0 of 1 trajectories complete"):
        pool.fetch_batch(1, order="strict", timeout=0.2)
    asyncio.run(client.submit_steps([make_step("slow", "p2")]))
    asyncio.run(client.complete_trajectory("slow", "p2", None))
    assert pool.fetch_batch(4, order="strict").columns.prompt_uids == ["p2", "p3", "p4", "p5"]


def test_a_batch_is_acknowledged_on_leaving_its_block_and_given_back_on_an_exception(
    client: PoolClient, pool: DataPool
) -> None:
    rollouts(client, "p0", "p1", "p2")
    with pytest.raises(ZeroDivisionError), pool.batch(2):
        raise ZeroDivisionError
    with pool.batch(3) as batch:
        assert sorted(zip(batch.columns.prompt_uids, batch.attempts_G.tolist(), strict=True)) == [
            ("p0", 1),
            ("p1", 1),
            ("p2", 0),
        ]
    assert pool.stats().channels["train"].shipped.steps == 3
    assert pool.stats().leases == 0


def test_a_lease_that_ran_out_is_told_at_acknowledgement(client: PoolClient, pool: DataPool) -> None:
    rollouts(client, "p0")
    late = pool.fetch_batch(1, lease=0.1)
    again = pool.fetch_batch(1, lease=60, timeout=10)
    with pytest.raises(LeaseExpired, match="ask for a longer one"):
        pool.ack(late)
    pool.ack(again)
    assert pool.stats().channels["train"].shipped.steps == 1


def test_a_lease_that_ran_out_is_over_for_whoever_only_looks(client: PoolClient, pool: DataPool) -> None:
    rollouts(client, "p0")
    pool.fetch_batch(1, lease=0.1)
    wait_until(lambda: pool.stats().leases == 0, "the lease to end")
    assert pool.stats().channels["train"].ready_groups == 1


def test_a_killed_shard_comes_back_with_all_it_had_acknowledged(
    client: PoolClient, pool: DataPool, plan: PoolPlan, namespace: str
) -> None:
    prompts = [f"p{n}" for n in range(12)]
    rollouts(client, *prompts)
    with pool.batch(2, lease=300) as leased:
        for name in plan.shard_names():
            os.kill(pid_of(name, namespace), signal.SIGKILL)
        rest = pool.fetch_batch(10, timeout=60)
    assert sorted([*rest.columns.prompt_uids, *leased.columns.prompt_uids]) == sorted(prompts)
    with pytest.raises(FetchTimeout):
        pool.fetch_batch(1, timeout=0.2)
    assert pool.stats().channels["train"].shipped.steps == 12


def test_rollouts_that_begin_and_end_at_once_are_answered_each_for_itself(client: PoolClient, pool: DataPool) -> None:
    async def stranger(n: int) -> None:
        with pytest.raises(UnknownTrajectory, match=f"no trajectory stranger{n} "):
            await client.complete_trajectory(f"stranger{n}", f"p{n}", None)

    async def all_of_them() -> None:
        await asyncio.gather(*(rollout(client, f"p{n}") for n in range(100)), *(stranger(n) for n in range(100)))

    asyncio.run(all_of_them())
    assert {step.prompt_uid for step in pool.fetch_batch(100, timeout=10).steps()} == {f"p{n}" for n in range(100)}


def test_trained_groups_can_be_mixed_into_later_batches(client: PoolClient, pool: DataPool) -> None:
    rollouts(client, *(f"p{n}" for n in range(24)))
    pool.fetch_batch(16)
    batch = pool.fetch_batch(8, history=0.5)
    assert 0 < batch.from_history_G.sum() <= 4


def test_the_gate_holds_on_every_shard_and_what_it_left_out_is_counted_together(
    client: PoolClient, pool: DataPool
) -> None:
    async def send(prompt: str, **second: Any) -> None:
        """One step that is always wanted, and one more."""
        await client.register_trajectory(Registration(f"t-{prompt}", prompt))
        steps = [make_step(f"t-{prompt}", prompt, uid=str(n), started_at=n, **(second if n else {})) for n in range(2)]
        assert await client.submit_steps(steps) == [SubmitVerdict.ACCEPTED] * 2
        await client.complete_trajectory(f"t-{prompt}", prompt, 1.0)

    def send_all(names: str) -> None:
        for n in range(8):
            asyncio.run(send(f"{names}-greedy-{n}", untrainable="greedy: temperature is 0"))
            asyncio.run(send(f"{names}-again-{n}", exactness=Exactness.RETOKENIZED))

    send_all("first")
    with pool.batch(16) as batch:
        assert batch.columns.uids == ["0"] * 16
        assert batch.rewards_T.tolist() == [1.0] * 16
    left_out = pool.stats().channels["train"].left_out
    assert {kind: tally.steps for kind, tally in left_out.items()} == {"exactness": 8, "greedy": 8}
    send_all("second")
    assert len(pool.fetch_batch(16, min_exactness="retokenized", untrainable=True).columns) == 32
    send_all("third")
    with pytest.raises(FetchTimeout, match="left out so far: .* exactness"):
        pool.fetch_batch(1, min_exactness="engine", timeout=1.0)
    assert pool.stats().channels["train"].held.steps == 0


def test_rewards_come_late_pacing_adds_up_and_the_version_reaches_every_shard(
    client: PoolClient, pool: DataPool, plan: PoolPlan, namespace: str
) -> None:
    rollouts(client, "p0", "p1")
    assert pool.give_reward(RewardGiven(trajectory_uid="t-p0", prompt_uid="p0", value=0.25, source="judge"))
    batch = pool.fetch_batch(2)
    assert dict(zip(batch.columns.prompt_uids, batch.columns.reward_sources, strict=True)) == {
        "p0": "judge",
        "p1": "completion",
    }
    assert pool.pacing().may_start == 2
    pool.set_policy_version(5)
    versions: list[int] = ray.get([actor(name, namespace).policy_version.remote() for name in plan.shard_names()])
    assert versions == [5] * SHARDS


def test_a_batch_from_one_shard_is_read_from_shared_memory_without_a_copy(namespace: str) -> None:
    client = started(PoolPlan(name="single"), namespace)
    steps = [make_step(f"t{n}", f"p{n}", step_index=0, is_last=True, prompt_ids=range(5000)) for n in range(64)]
    asyncio.run(client.submit_steps(steps, channel="train"))
    batch = DataPool(client).fetch_batch(64)
    for array in (batch.columns.tokens, batch.columns.logprobs):
        assert isinstance(array, np.ndarray)
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_a_pool_whose_journal_cannot_be_used_says_so_and_leaves_no_actor(tmp_path: Path, namespace: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PoolUnavailable, match="could not start: .*file"):
        start_pool(PoolPlan(journal=str(tmp_path / "file" / "below")), namespace)
    with pytest.raises(ValueError, match="data_pool"):
        ray.get_actor("data_pool", namespace)
