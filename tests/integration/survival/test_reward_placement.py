"""D16: reward workers run on nodes that offer CPUs, not beside gateways or Ray's head."""

from functools import partial
from pathlib import Path

import pytest
import ray
from stepwell.pool.actors import start_pool

from rig.actors import node_of
from rig.ray_nodes import joined_node
from rig.waiting import wait_until
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.worker import RewardPlan, place_workers, start_rewards


@pytest.mark.parametrize("cpus", [None, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_workers_avoid_the_nodes_of_gateways_and_of_the_head(
    namespace: str, tmp_path: Path, cpus: float | None
) -> None:
    function = tmp_path / "functions.py"
    function.write_text("def score(sample):\n    return 1.0\n")
    start_pool(PoolPlan(limits=Limits(require_reward=True)), namespace)
    plan = RewardPlan(workers=2, cpus=cpus, job=Job(function=f"{function}:score", folder=str(tmp_path), children=1))
    with joined_node(), joined_node(num_cpus=3) as working:
        start_rewards(plan, partial(PoolClient, "data_pool", namespace), namespace)
        assert {node_of(worker, namespace) for worker in plan.worker_names()} == {working}
        for worker in plan.worker_names():
            ray.kill(ray.get_actor(worker, namespace))


def test_on_one_node_workers_run_beside_the_head(namespace: str) -> None:
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, "the nodes of other tests to be gone")  # type: ignore[no-untyped-call]
    wait_until(lambda: ray.available_resources()["CPU"] >= 2, "the workers of other tests to be gone")  # type: ignore[no-untyped-call]
    assert place_workers(2, None) == {"num_cpus": 1.0, "scheduling_strategy": "SPREAD"}


def test_without_enough_cpus_workers_reserve_next_to_none(namespace: str) -> None:
    assert place_workers(1_000, None)["num_cpus"] < 0.01
