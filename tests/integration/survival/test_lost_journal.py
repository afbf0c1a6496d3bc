"""D5, D10: a shard never starts empty where it had a journal. It waits, says so, and its producers keep their steps."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from stepwell.pool.actors import start_pool

from rig.actors import actor, pid_of
from rig.builders import make_step
from rig.ray_nodes import joined_node
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from tests.integration.pool.conftest import started

PATIENCE = 120.0
SOON = 2.0
SECOND = "127.0.0.2"


async def is_delivered(client: PoolClient, uid: str) -> bool:
    """Whether the pool holds a step of trajectory t that was sent as a gateway does: again, until it is answered. Which
    try came through is not known, so the pool is asked once more after that."""
    await answer(client, uid)
    return await answer(client, uid) is SubmitVerdict.DUPLICATE


async def answer(client: PoolClient, uid: str) -> SubmitVerdict:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                (verdict,) = await client.submit_steps([make_step("t", "p", uid=uid)])
            except PoolUnavailable:
                await asyncio.sleep(0.2)
            else:
                return verdict


async def refusal(client: PoolClient, about: str) -> str:
    """Why a step is not taken, once that is about the journal and not about the restart."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with pytest.raises(PoolUnavailable) as refused:
                await client.submit_steps([make_step("t", "p", uid="early")])
            if about in str(refused.value):
                return str(refused.value)


async def test_a_shard_whose_volume_is_missing_waits_for_it_and_steps_are_held(tmp_path: Path, namespace: str) -> None:
    volume = tmp_path / "volume"
    plan = PoolPlan(journal=str(volume / "journal"))
    client = started(plan, namespace)
    await client.register_trajectory(Registration("t", "p"))
    volume.rename(tmp_path / "detached")
    os.kill(pid_of(plan.name, namespace), signal.SIGKILL)
    assert "mount its volume" in await refusal(client, "is missing or empty")
    with pytest.raises(PoolUnavailable, match="is missing or empty"):
        start_pool(plan, namespace)
    assert not volume.exists()
    (tmp_path / "detached").rename(volume)
    assert await is_delivered(client, "kept")


async def test_a_shard_whose_journal_is_gone_from_the_database_waits_for_it(namespace: str, postgres_url: str) -> None:
    import psycopg

    plan = PoolPlan(name=uuid4().hex, journal=postgres_url)
    client = started(plan, namespace)
    assert (await client.shards.plan()).nodes == (), "it may run anywhere"
    await client.register_trajectory(Registration("t", "p"))
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute(f'ALTER SCHEMA "stepwell_{plan.name}" RENAME TO "gone_{plan.name}"')
        os.kill(pid_of(plan.name, namespace), signal.SIGKILL)
        assert "is --journal the right database?" in await refusal(client, "is missing or empty")
        database.execute(f'ALTER SCHEMA "gone_{plan.name}" RENAME TO "stepwell_{plan.name}"')
    assert await is_delivered(client, "kept")
    ray.kill(actor(plan.name, namespace))
    start_pool(plan, namespace)
    assert await answer(PoolClient(plan.name, namespace), "kept") is SubmitVerdict.DUPLICATE


async def test_a_pool_that_was_created_again_without_its_journals_gets_no_steps_of_the_old_one(
    tmp_path: Path, namespace: str
) -> None:
    plan = PoolPlan(journal=str(tmp_path / "journal"))
    client = started(plan, namespace)
    await client.register_trajectory(Registration("t", "p"))
    ray.kill(actor(plan.name, namespace))
    shutil.move(tmp_path / "journal", tmp_path / "elsewhere")
    start_pool(plan, namespace)
    assert "restart this process" in await refusal(client, "created again with other journals")
    ray.kill(actor(plan.name, namespace))
    shutil.rmtree(tmp_path / "journal")
    shutil.move(tmp_path / "elsewhere", tmp_path / "journal")
    start_pool(plan, namespace)
    assert await is_delivered(client, "kept")


def test_a_pool_that_is_created_again_has_as_many_shards_as_before(tmp_path: Path, namespace: str) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path))
    assert start_pool(plan, namespace) == plan
    assert start_pool(PoolPlan(shards=3, journal=str(tmp_path)), namespace) == plan, "a running pool stays as it is"
    for name in plan.shard_names():
        ray.kill(actor(name, namespace))
    assert start_pool(PoolPlan(shards=3, journal=str(tmp_path)), namespace) == plan


async def test_a_shard_waits_for_the_node_with_its_journal_and_does_not_start_on_another(
    tmp_path: Path, namespace: str
) -> None:
    plan = PoolPlan(journal=str(tmp_path))
    client = PoolClient(plan.name, namespace, timeout=SOON)
    with joined_node(node_ip_address=SECOND) as node:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        in_force: PoolPlan = ray.get(
            ray.remote(start_pool).options(num_cpus=0, scheduling_strategy=there).remote(plan, namespace)
        )
        assert in_force.nodes == (SECOND,)
        async with asyncio.timeout(PATIENCE):
            await client.register_trajectory(Registration("t", "p"))
    with pytest.raises(PoolUnavailable, match="If the node with its journals is away, start Ray there again"):
        start_pool(plan, namespace, timeout=SOON)
    with pytest.raises(PoolUnavailable):
        await client.submit_steps([make_step("t", "p", uid="early")])
    with joined_node(node_ip_address=SECOND):
        assert await is_delivered(client, "kept")
