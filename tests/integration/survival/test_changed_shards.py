"""Issue 16, 4: shards join and leave a pool of Ray actors while it runs; restarts in between lose nothing."""

import asyncio
import os
import signal
from pathlib import Path

import ray

from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.shard_layout import Layout
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.actor import reshard_pool, start_pool
from tests.builders import make_step
from tests.integration.pool.conftest import started
from tests.rig.actors import actor, pid_of

PROMPTS = [f"p{n}" for n in range(12)]


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
