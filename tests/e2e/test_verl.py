"""Batches from real pools, through the real verl, in its own environment: one program for both, because verl takes long
to import."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from stepwell.pool.actors import start_pool

from rig.ray_cluster import RayCluster
from rig.trainers.process import answer_of, start_program
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from tests.unit.trainers.models import one_turn

REWARDS = {"p": (1.0, 0.0, 0.0, 1.0), "q": (1.0, 1.0, 1.0, 1.0), "r": (0.0, 0.25, 0.5, 0.0)}
"""By group."""


async def fill(pool: PoolClient) -> None:
    """Each rollout has two turns, the second of which continues the first."""
    for prompt, rewards in REWARDS.items():
        for n, reward in enumerate(rewards):
            uid = f"{prompt}{n}"
            await pool.register_trajectory(Registration(uid, prompt, group_size=len(rewards)))
            turns = [one_turn(uid, prompt, [1, 2], [3 + n]), one_turn(uid, prompt, [1, 2, 3 + n, 9], [5, 6])]
            await pool.submit_steps(turns)
            await pool.complete_trajectory(uid, prompt, reward)


async def fill_with_forks(pool: PoolClient) -> None:
    """In each group one rollout has a fork, and so two rows."""
    for prompt, rewards in REWARDS.items():
        for n, reward in enumerate(rewards):
            uid = f"{prompt}{n}"
            await pool.register_trajectory(Registration(uid, prompt, group_size=len(rewards)))
            fork = [one_turn(uid, prompt, [7, 8, 9], [4])] if n == 0 else []
            await pool.submit_steps([one_turn(uid, prompt, [1, 2], [3 + n]), *fork])
            await pool.complete_trajectory(uid, prompt, reward)


@pytest.fixture(scope="module")
def answers(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Of the program, by the way that a batch took."""
    with ray_cluster.namespace() as namespace:
        for name, fills in (("verl", fill), ("verl-queue", fill_with_forks)):
            start_pool(PoolPlan(name=name), namespace)
            asyncio.run(fills(PoolClient(name, namespace)))
        asked = {
            "pool": "verl",
            "queue_pool": "verl-queue",
            "address": ray_cluster.address,
            "namespace": namespace,
            "groups": len(REWARDS),
        }
        log = tmp_path_factory.mktemp("verl") / "verl.log"
        yield answer_of(start_program("verl", "with_verl.py", asked, log=log), log, timeout=300)


def test_a_batch_passes_through_verl_and_its_advantages_are_ours(answers: dict[str, Any]) -> None:
    answer = answers["data_proto"]
    assert answer["rows"] == 12
    assert answer["parts"] == [6, 6]
    assert answer["gap"] < 1e-6
    assert answer["gap_of_tensor"] < 1e-3, "ours has an epsilon of 1e-4, verl's of 1e-6"
    assert answer["advantages"] == [-0.866, -0.783, 0.0, 0.261, 0.866, 1.306]
    assert answer["unscored"] == 0


def test_rows_pass_through_verls_queue_and_its_advantages_of_several_rows_are_ours(answers: dict[str, Any]) -> None:
    answer = answers["queue"]
    assert (answer["rows"], answer["rollouts"]) == (10, 8), "the group in which all earned the same is not trained"
    assert answer["gap"] < 1e-3, "ours has an epsilon of 1e-4, verl's of 1e-6"
    assert answer["is_written"] == {"advantages": True, "returns": True, "old_log_probs": True}
    assert answer["ids"][:2] == [[1, 2, 3], [7, 8, 9, 4]]
    assert answer["prompts"][:2] == [2, 3]
    assert answer["versions"] == [4], "version 0 is that of the weights before step 5"
    assert answer["reward"] == pytest.approx(sum(map(sum, REWARDS.values())) / 12)
    assert answer["is_known"]
    assert answer["missing"] == [], "verl has no such methods any more"
