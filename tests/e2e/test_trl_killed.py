"""TRL, in its own environment, killed with SIGKILL at random moments and resumed: it trains every group exactly once.

Some groups are too stale: TRL drops them, and that neither loses nor repeats another one.
"""

import asyncio
import secrets
from pathlib import Path

import pytest
from safetensors.torch import load_file
from stepwell.pool.actors import start_pool

from rig.builders import make_step
from rig.ray_cluster import RayCluster
from rig.tiny_model import make_tiny_model
from rig.trainers.lives import passes_for
from rig.trainers.process import answer_of, start_program
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient

ROLLOUTS, DIGIT = 2, 16
SAMPLES = 3
"""Of a micro-batch: every other one ends within a group."""
AHEAD = 20
"""Groups beyond those that are trained: TRL takes more than it trains, and what a killed life had leased returns some
seconds later."""
VERSION, STALE_VERSION, MAX_STALENESS = 300, 0, 299
EVERY_STALE = 7
"""One group of so many."""


def is_stale(group: int) -> bool:
    return group % EVERY_STALE == EVERY_STALE - 1


async def fill(client: PoolClient, groups: int) -> None:
    for group in range(groups):
        for rollout in range(ROLLOUTS):
            uid, prompt, number = f"{group}-{rollout}", f"p{group}", ROLLOUTS * group + rollout
            await client.register_trajectory(Registration(uid, prompt, group_size=ROLLOUTS))
            step = make_step(
                uid,
                prompt,
                uid=uid,
                prompt_ids=list(divmod(number, DIGIT)),
                response_ids=[3, 4],
                temperature=1.0,
                policy_version=STALE_VERSION if is_stale(group) else VERSION,
            )
            assert await client.submit_steps([step]) == [SubmitVerdict.ACCEPTED]
            assert await client.complete_trajectory(uid, prompt, float(rollout)) is EndResult.COMPLETED


def groups_left(pool: DataPool) -> set[int]:
    """Those that no trainer has acknowledged."""
    left = pool.stats().channels["train"].held.steps // ROLLOUTS
    batch = pool.fetch_batch(left, timeout=60)
    return {int(prompt.removeprefix("p")) for prompt in batch.columns.prompt_uids}


@pytest.mark.parametrize(
    ("kills", "micro_batches"),
    [
        (4, 1),
        pytest.param(50, 1, marks=pytest.mark.nightly),
        pytest.param(50, 2, marks=pytest.mark.nightly),
    ],
)
def test_trl_killed_at_random_moments_trains_every_group_exactly_once(
    ray_cluster: RayCluster, own_namespace: str, tmp_path: Path, kills: int, micro_batches: int
) -> None:
    updates = passes_for(kills) // micro_batches + 1
    trained_groups = updates * micro_batches * SAMPLES // ROLLOUTS
    groups = AHEAD + trained_groups * EVERY_STALE // (EVERY_STALE - 1)
    start_pool(PoolPlan(), own_namespace)
    client = PoolClient("data_pool", own_namespace)
    asyncio.run(fill(client, groups))
    pool = DataPool(client)
    pool.set_policy_version(VERSION)
    asked = {
        "address": ray_cluster.address,
        "namespace": own_namespace,
        "folder": str(tmp_path / "trl"),
        "model": str(make_tiny_model(tmp_path / "model")),
        "seed": (seed := secrets.randbits(32)),
        "kills": kills,
        "updates": updates,
        "samples": SAMPLES,
        "micro_batches": micro_batches,
        "max_staleness": MAX_STALENESS,
        "rollouts": ROLLOUTS * groups,
    }
    log = tmp_path / "trl.log"

    answer = answer_of(start_program("trl", "killed_trl.py", asked, log=log), log, timeout=60 + 30 * kills)

    counts = load_file(Path(answer["checkpoint"]) / "model.safetensors")["counts"].reshape(-1, ROLLOUTS).int().tolist()
    left = groups_left(pool)
    expected = [[0 if group in left or is_stale(group) else 1] * ROLLOUTS for group in range(groups)]
    assert counts == expected, f"seed {seed}: {answer['moments']}"
    assert sum(map(sum, counts)) == updates * micro_batches * SAMPLES
    assert any(is_stale(group) for group in range(groups) if group not in left), "no stale group was dropped"
