"""A DataPool of several actors, with journals: leases, order, and shards that are killed."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
from stepwell.pool.actors import start_pool

from rig.actors import pid_of
from rig.builders import make_step
from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient
from tests.integration.pool.conftest import started

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
