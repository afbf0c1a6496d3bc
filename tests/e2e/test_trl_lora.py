"""TRL trains LoRA adapters: the engines get plain weights, one tensor at a time, and a resumed run continues.

Every second group tells neither log-probabilities nor a temperature, and is trained in TRL's own loss all the same.
"""

import asyncio
import math
from pathlib import Path
from typing import Any

from stepwell.pool.actors import start_pool

from rig.builders import make_step
from rig.ray_cluster import RayCluster
from rig.tiny_model import make_tiny_model
from rig.trainers.process import answer_of, start_program
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient

GROUPS, ROLLOUTS, TRAINED = 24, 2, 24
ROUNDING = 1e-6


async def fill(client: PoolClient) -> None:
    for group in range(GROUPS):
        told: dict[str, Any] = {"temperature": 1.0} if group % 2 else {"temperature": None, "response_logprobs": None}
        for rollout in range(ROLLOUTS):
            uid, prompt = f"{group}-{rollout}", f"p{group}"
            await client.register_trajectory(Registration(uid, prompt, group_size=ROLLOUTS))
            await client.submit_steps([make_step(uid, prompt, uid=uid, prompt_ids=[group, rollout], **told)])
            await client.complete_trajectory(uid, prompt, float(rollout))


def test_adapters_are_merged_for_the_engines_and_continue_after_a_resume(
    ray_cluster: RayCluster, own_namespace: str, tmp_path: Path
) -> None:
    start_pool(PoolPlan(), own_namespace)
    client = PoolClient("data_pool", own_namespace)
    asyncio.run(fill(client))
    asked = {
        "address": ray_cluster.address,
        "namespace": own_namespace,
        "folder": str(tmp_path / "trl"),
        "model": str(make_tiny_model(tmp_path / "model")),
    }
    log = tmp_path / "trl.log"

    answer = answer_of(start_program("trl", "lora_trl.py", asked, log=log), log, timeout=240)

    assert answer["names"] == answer["expected_names"], "the engine knows its own names only"
    assert answer["learned"] > 100 * ROUNDING, "the adapters have hardly changed: a gap would not show"
    assert answer["off_the_merged"] < ROUNDING, "what was sent is not the base weights with the adapters added"
    assert answer["off_the_base"] < ROUNDING, "the base weights are trained too, or the adapters stayed in them"
    assert answer["off_the_resumed"] < ROUNDING, "the resumed run begins with other weights"
    assert max(answer["told"]["logprobs_current"]) >= 0.5, "TRL's log does not say what had no log-probabilities"
    assert max(answer["told"]["temperatures_assumed"]) > 0.0
    assert all(math.isfinite(ratio) for ratio in answer["told"]["ratio"])
    assert answer["syncs"] == 4, "once at the start, then every update"
    assert DataPool(client).stats().channels["train"].shipped.steps == TRAINED
