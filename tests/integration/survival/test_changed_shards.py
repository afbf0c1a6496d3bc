"""Issue 16, 4: shards join and leave a pool of Ray actors while it runs; restarts in between lose nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from itertools import count
from pathlib import Path

import ray
from stepwell.pool.actors import reshard_pool, start_pool

from rig.actors import actor, pid_of
from rig.builders import make_step
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import Layout, Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from tests.integration.pool.conftest import started

PROMPTS = [f"p{n}" for n in range(12)]
PAUSE = 0.1
"""Seconds between two rollouts."""
IN_FLIGHT = 6
RESHARDER = """
import os, signal, sys
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.pool import actors as actor

address, namespace, shards, moment = sys.argv[1:]
made = []

def end():
    os.kill(os.getpid(), signal.SIGKILL)

class KilledTransport(actor.RayTransport):
    async def call(self, shard, method, args, kwargs):
        decides = (shard, method) == ("data_pool", "adopt_plan")
        if (moment, method) == ("all started", "serving") or (moment == "all told" and decides):
            end()
        answer = await super().call(shard, method, args, kwargs)
        if moment == "in force" and decides:
            end()
        return answer

def make(*args, start=actor._actor, **kwargs):
    if moment == "one started" and made:
        end()
    made.append(start(*args, **kwargs))
    return made[-1]

join_ray(address, namespace)
actor.RayTransport, actor._actor = KilledTransport, make
actor.reshard_pool("data_pool", int(shards), namespace)
"""
CHANGES = (("one started", 3, 2), ("all started", 3, 1), ("all told", 3, 4), ("in force", 3, 2))
"""When the process is killed that changes the number of shards, to which number, and to which it is changed then."""


async def roll_out(client: PoolClient, uid: str, prompt: str) -> None:
    await client.register_trajectory(Registration(uid, prompt))
    assert await client.submit_steps([make_step(uid, prompt, uid=uid)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def test_groups_stay_whole_while_shards_join_and_leave_and_are_killed(tmp_path: Path, namespace: str) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path), limits=Limits(group_size=2))
    client = started(plan, namespace)
    for prompt in PROMPTS:
        await roll_out(client, f"{prompt}-a", prompt)
    changed = await asyncio.to_thread(reshard_pool, plan.name, 3, namespace)
    assert changed.layouts == (Layout(1, 2), Layout(2, 3))
    for shard in changed.shard_names():
        os.kill(pid_of(shard, namespace), signal.SIGKILL)
    for prompt in PROMPTS[:6]:
        await roll_out(client, f"{prompt}-b", prompt)
    await roll_out(client, "new-a", "new")
    changed = await asyncio.to_thread(reshard_pool, plan.name, 1, namespace)
    assert changed.layouts == (Layout(1, 2), Layout(2, 3), Layout(3, 1))
    for shard in changed.shard_names():
        ray.kill(actor(shard, namespace))
    assert start_pool(plan, namespace).layouts == changed.layouts
    for prompt in PROMPTS[6:]:
        await roll_out(client, f"{prompt}-b", prompt)
    await roll_out(client, "new-b", "new")
    batch = await client.fetch_batch(len(PROMPTS) + 1, lease=60.0)
    found = [sorted(trajectory[0].trajectory_uid for trajectory in group) for group in batch.groups()]
    assert sorted(found) == sorted([f"{prompt}-a", f"{prompt}-b"] for prompt in [*PROMPTS, "new"])
    await client.ack(batch)


async def roll_out_until(stopped: asyncio.Event, client: PoolClient) -> int:
    """Groups of two rollouts of two steps each, of which some are always in flight. Returns how many groups."""
    begun: deque[tuple[str, str]] = deque()
    for n in count():
        if stopped.is_set() and n % 2 == 0:
            break
        uid, prompt = f"t{n}", f"in-flight-{n // 2}"
        await client.register_trajectory(Registration(uid, prompt))
        assert await client.submit_steps([make_step(uid, prompt, uid=f"{uid}-0")]) == [SubmitVerdict.ACCEPTED]
        begun.append((uid, prompt))
        if len(begun) > IN_FLIGHT:
            await end(client, *begun.popleft())
        await asyncio.sleep(PAUSE)
    for uid, prompt in begun:
        await end(client, uid, prompt)
    return n // 2


async def end(client: PoolClient, uid: str, prompt: str) -> None:
    assert await client.submit_steps([make_step(uid, prompt, uid=f"{uid}-1")]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(uid, prompt, 1.0) is EndResult.COMPLETED


async def test_rollouts_in_flight_are_trained_once_when_changes_are_interrupted_and_others_follow(
    tmp_path: Path, ray_cluster: RayCluster, namespace: str
) -> None:
    plan = PoolPlan(shards=1, journal=str(tmp_path), limits=Limits(group_size=2))
    client = started(plan, namespace)
    stopped = asyncio.Event()
    working = asyncio.create_task(roll_out_until(stopped, client))
    for moment, aimed, shards in CHANGES:
        line = [sys.executable, "-c", RESHARDER, ray_cluster.address, namespace, str(aimed), moment]
        killed = await asyncio.to_thread(subprocess.run, line, env=os.environ, check=False)
        assert killed.returncode == -signal.SIGKILL, moment
        changed = await asyncio.to_thread(reshard_pool, plan.name, shards, namespace)
        assert changed.shards == shards
        followed = ray.get([actor(shard, namespace).plan.remote() for shard in changed.shard_names()])
        assert {found.layouts for found in followed} == {changed.layouts}, moment
    assert [layout.shards for layout in changed.layouts] == [1, 2, 1, 4, 3, 2]
    stopped.set()
    groups = await working
    batch = await client.fetch_batch(groups, timeout=60.0, lease=60.0)
    assert sorted(batch.columns.uids) == sorted(f"t{n}-{step}" for n in range(2 * groups) for step in range(2))
    assert sorted(len(group) for group in batch.groups()) == [2] * groups
    await client.ack(batch)
    assert (await client.stats()).channels["train"].groups == 0
