"""verl's own trainer, started by examples/verl/train.sh, takes a few steps from a pool and brings its weights to the
shared engine.

test_verl_trainer.py has the long form: agents that learn, and a kill.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from stepwell.pool.actors import start_pool

from rig.calls import get
from rig.ray_cluster import RayCluster
from rig.ray_nodes import joined_node
from rig.trainers.verl_run import ALIKE, RESOURCES, start_verl
from rig.vllm_server import VllmServer
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient
from tests.unit.trainers.models import one_turn

POOL = "training_in_verl"
STEPS, GROUPS, MINI_BATCHES = 3, 4, 2
ROW = 5
"""Tokens of each row."""
TOKENS = 2
"""Trained tokens of each rollout without its fork."""
TIMEOUT = 600.0
"""Seconds. verl starts six processes, each of which imports torch."""


async def fill(pool: PoolClient) -> None:
    """In each group but the last, one rollout has a fork, and so two rows: verl must pad a step with one row less. In
    every second group, no step but the fork tells log-probabilities and a temperature."""
    for number in range(STEPS * GROUPS):
        prompt = f"p{number}"
        for n in range(2):
            uid = f"{prompt}-{n}"
            await pool.register_trajectory(Registration(uid, prompt, group_size=2))
            has_fork = n == 0 and number < STEPS * GROUPS - 1
            fork = [one_turn(uid, prompt, [7, 8, 9, number], [4])] if has_fork else []
            silent: dict[str, Any] = {} if number % 2 else {"response_logprobs": None, "temperature": None}
            await pool.submit_steps([one_turn(uid, prompt, [1, 2, number], [3, 4 + n], **silent), *fork])
            await pool.complete_trajectory(uid, prompt, float(n))


@pytest.mark.usefixtures("weights")
async def test_verl_trains_and_the_engine_has_its_weights(
    vllm: VllmServer, tiny_model: Path, ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    start_pool(PoolPlan(name=POOL), namespace)
    await fill(PoolClient(POOL, namespace))
    overrides = {
        "data.train_batch_size": GROUPS,
        "actor_rollout_ref.actor.ppo_mini_batch_size": GROUPS // MINI_BATCHES,
        "trainer.total_training_steps": STEPS,
        "trainer.v1.stepwell.pool": POOL,
        "trainer.v1.stepwell.namespace": namespace,
        "trainer.v1.stepwell.engines": f"[{vllm.url}]",
    }

    with joined_node(**RESOURCES):
        run = start_verl(ray_cluster.address, overrides, model=tiny_model, folder=tmp_path, name="verl")
        metrics = await asyncio.to_thread(run.wait, TIMEOUT)

    assert [told["step"] for told in metrics] == [1, 2, 3]
    rows, tokens = [told["stepwell/rows"] for told in metrics], [told["global_seqlen/mean"] for told in metrics]
    assert rows == [3 * GROUPS, 3 * GROUPS, 3 * GROUPS - 1]
    assert tokens[:2] == [ROW * count for count in rows[:2]]
    assert tokens[2] > ROW * rows[2], "verl has padded it"
    assert all(told["actor/grad_norm"] > 0 for told in metrics), "verl's own metrics are there too"
    assert [told["stepwell/logprobs_current"] for told in metrics] == [TOKENS * GROUPS] * 3
    assert [told["stepwell/temperatures_assumed"] for told in metrics] == [GROUPS] * 3
    assert max(told["stepwell/logprob_gap"] for told in metrics) < ALIKE
    stats = DataPool(PoolClient(POOL, namespace)).stats()
    assert (stats.policy_version, stats.leases) == (STEPS, 0)
    assert stats.channels["train"].shipped.steps == STEPS * GROUPS * 3 - 1
    assert (await get(f"{vllm.url}/weight_info")).json()["weight_version"] == str(STEPS)
