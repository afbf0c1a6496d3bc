"""verl's own trainer, killed with SIGKILL at random moments and started again by the same command: every group is
trained exactly once.

A start of verl takes about half a minute, so 50 kills take more than half an hour.
"""

import asyncio
import json
import random
import secrets
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.ray_cluster import RayCluster
from rig.ray_nodes import joined_node
from rig.trainers.groups_ahead import NEVER, GroupsAhead
from rig.trainers.process import lives_on
from rig.trainers.verl_run import RESOURCES, VerlRun, start_verl
from rig.vllm_server import VllmServer
from rig.waiting import until
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient
from tests.e2e.test_verl_trainer import START_TIMEOUT, STEP_TIMEOUT, has_queue
from tests.unit.trainers.models import one_turn

POOL = "verl_killed"
KILLS, ROLLOUTS = 50, 2
A_STEP, AHEAD = 4, 400
"""Groups: in a step, and when a run begins."""
LONGEST_START, LONGEST_RUN = 60.0, 20.0
"""Seconds: how long a run lives at most, from its start or from its first step on."""

pytestmark = pytest.mark.nightly


async def add_group(pool: PoolClient, number: int) -> None:
    prompt = f"p{number}"
    for rollout in range(ROLLOUTS):
        uid = f"{prompt}-{rollout}"
        await pool.register_trajectory(Registration(uid, prompt, group_size=ROLLOUTS))
        await pool.submit_steps([one_turn(uid, prompt, [1, 2, number % 100], [3, 4 + rollout])])
        await pool.complete_trajectory(uid, prompt, float(rollout))


async def kill_somewhere(run: VerlRun, chance: random.Random) -> None:
    try:
        if chance.choice((True, False)):
            seconds = chance.uniform(0.0, LONGEST_START)
        else:
            await until(lambda: run.process.poll() is not None or bool(run.metrics()), "a step", START_TIMEOUT)
            seconds = chance.uniform(0.0, LONGEST_RUN)
        assert await asyncio.to_thread(lives_on, run.process, seconds), run.log.read_text()[-8000:]
    finally:
        run.kill()
    await until(lambda: not has_queue(), "Ray to end verl's processes", STEP_TIMEOUT)


@pytest.mark.usefixtures("weights")
async def test_verl_killed_at_random_moments_trains_every_group_exactly_once(
    vllm: VllmServer, tiny_model: Path, ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    chance = random.Random(seed := secrets.randbits(32))
    start_pool(PoolPlan(name=POOL), namespace)
    client = PoolClient(POOL, namespace)
    groups = GroupsAhead(client, "train", add_group, ROLLOUTS)
    checkpoints = tmp_path / "checkpoints"

    def saved_step() -> int:
        latest = checkpoints / "latest_checkpointed_iteration.txt"
        return int(latest.read_text()) if latest.exists() else 0

    def train(name: str, steps: int) -> VerlRun:
        overrides = {
            "data.train_batch_size": A_STEP,
            "actor_rollout_ref.actor.ppo_mini_batch_size": A_STEP,
            "trainer.total_training_steps": steps,
            "trainer.save_freq": 1,
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.v1.stepwell.pool": POOL,
            "trainer.v1.stepwell.namespace": namespace,
            "trainer.v1.stepwell.engines": f"[{vllm.url}]",
        }
        return start_verl(ray_cluster.address, overrides, model=tiny_model, folder=tmp_path, name=name)

    with joined_node(**RESOURCES):
        for number in range(KILLS):
            await groups.top_up(AHEAD)
            await kill_somewhere(train(f"killed-{number}", NEVER), chance)
        steps = saved_step() + 3
        await asyncio.to_thread(train("last", steps).wait, START_TIMEOUT + 3 * STEP_TIMEOUT)
    pool = DataPool(client)
    await until(lambda: not pool.stats().leases, "the leases of killed runs to return")

    trained = json.loads((checkpoints / f"global_step_{steps}" / "stepwell.json").read_text())["trajectories"]
    assert len(set(trained)) == len(trained) == steps * A_STEP * ROLLOUTS, f"seed {seed}"
    assert await groups.held() == groups.added - steps * A_STEP, f"seed {seed}"
    assert steps > KILLS // 4, f"seed {seed}: most runs were killed before their first checkpoint"
