"""D16: reward workers run on nodes that offer CPUs, not beside gateways or Ray's head."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.actor import start_pool
from stepwell.rewards.sandbox.messages import Job
from stepwell.rewards.worker import RewardPlan, start_rewards
from stepwell.rewards.worker_placement import place_workers
from tests.rig.waiting import wait_until


@contextmanager
def another_node(cpus: int) -> Iterator[str]:
    """Of the tests' cluster, whose head has CPUs; gives its id."""
    nodes = Cluster(shutdown_at_exit=False)
    nodes.head_node = ray._private.worker._global_node
    node = nodes.add_node(num_cpus=cpus, object_store_memory=80 * 2**20)
    try:
        yield node.node_id
    finally:
        nodes.remove_node(node)


def node_of(worker: str, namespace: str) -> str:
    def node(_: object) -> str:
        return str(ray.get_runtime_context().get_node_id())

    return str(ray.get(ray.get_actor(worker, namespace).__ray_call__.remote(node)))


@pytest.mark.parametrize("cpus", [None, 0.0])
def test_workers_avoid_the_nodes_of_gateways_and_of_the_head(
    namespace: str, tmp_path: Path, cpus: float | None
) -> None:
    function = tmp_path / "functions.py"
    function.write_text("def score(sample):\n    return 1.0\n")
    start_pool(PoolPlan(limits=Limits(require_reward=True)), namespace)
    plan = RewardPlan(workers=2, cpus=cpus, job=Job(function=f"{function}:score", folder=str(tmp_path), children=1))
    with ExitStack() as stack:
        stack.enter_context(another_node(cpus=0))
        working = stack.enter_context(another_node(cpus=3))
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
