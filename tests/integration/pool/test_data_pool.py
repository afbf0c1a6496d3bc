"""The DataPool as a Ray actor, reached as trainers and gateways reach it."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray
from stepwell.pool.actors import start_pool
from stepwell.pool.slices.producing import AddSteps

from rig.actors import pid_of
from rig.builders import make_step, same_step
from rig.ray_cluster import RayCluster
from stepwell.errors import BadRequest, Conflict, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.leasing import BatchRequest, Settlement
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.client.batch import batch_of
from stepwell.pool.shard.ray_transport import RayTransport
from stepwell.steps.columns import pack
from tests.integration.pool.conftest import started


@pytest.fixture
def client(namespace: str) -> PoolClient:
    return started(PoolPlan(limits=Limits(max_queue_size=100)), namespace)


async def rollout(client: PoolClient, uid: str, prompt: str, reward: float) -> None:
    await client.register_trajectory(Registration(uid, prompt))
    assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, prompt, reward) is EndResult.COMPLETED


def test_get_actor_finds_it_by_name_and_its_methods_work(client: PoolClient, namespace: str) -> None:
    pool = ray.get_actor("data_pool", namespace)
    step = make_step(step_index=0, is_last=True, reward=1.0, metadata={"source": "test"})
    assert ray.get(pool.run.remote([AddSteps(pack([step]), "train")])) == [["accepted"]]
    batch = batch_of(ray.get(pool.take.remote(BatchRequest(count=1, channel="train"), 60.0, "lease")))
    assert len(batch) == 1
    assert same_step(batch.groups()[0][0][0], replace(step, trajectory_return=1.0, reward_of="step"))
    assert ray.get(pool.ack.remote("lease")) is Settlement.DONE
    ray.get(pool.set_policy_version.remote(3))
    assert ray.get(pool.stats.remote()).policy_version == 3


def test_starting_a_pool_that_exists_finds_it_with_what_it_holds(namespace: str, client: PoolClient) -> None:
    asyncio.run(rollout(client, "t", "p", 1.0))
    start_pool(PoolPlan(), namespace)
    assert asyncio.run(client.stats()).channels["train"].ready_groups == 1


async def test_refusals_reach_the_caller_as_our_own_errors_in_one_line(client: PoolClient) -> None:
    await client.register_trajectory(Registration("t", "p"))
    with pytest.raises(Conflict, match=r"^trajectory t belongs to prompt_uid 'p'$"):
        await client.register_trajectory(Registration("t", "q"))
    with pytest.raises(UnknownTrajectory, match="POST /init_trajectory first$"):
        await client.complete_trajectory("nobody", "p", None)
    with pytest.raises(BadRequest, match="at least one of its groups, not 0"):
        await client.fetch_batch(0, timeout=1.0)


async def test_a_new_policy_version_reaches_every_gateway_at_once(client: PoolClient, namespace: str) -> None:
    following = asyncio.create_task(client.follow())
    await PoolClient("data_pool", namespace).set_policy_version(7)
    async with asyncio.timeout(60):
        while client.policy_version != 7:
            await asyncio.sleep(0.005)
    following.cancel()


async def test_a_missing_pool_is_named_with_the_command_that_makes_it(ray_cluster: RayCluster) -> None:
    with pytest.raises(PoolUnavailable, match="no DataPool named 'nowhere' .* stepwell pool --name nowhere"):
        await PoolClient("nowhere", "empty").check()


async def test_calls_wait_for_a_killed_pool_to_come_back(client: PoolClient, namespace: str) -> None:
    await rollout(client, "before", "p", 1.0)
    os.kill(await asyncio.to_thread(pid_of, "data_pool", namespace), signal.SIGKILL)
    await rollout(client, "after", "p", 1.0)
    assert (await client.stats()).channels["train"].ready_groups == 1


async def test_a_call_that_an_actor_of_another_release_does_not_have_says_so(
    client: PoolClient, namespace: str
) -> None:
    with pytest.raises(PoolUnavailable, match="data_pool is of another release, which has no unheard_of"):
        await RayTransport(namespace).call("data_pool", "unheard_of", (), {})
