"""Shards run where the journals are: on the node that offers the pool's resource, and nowhere else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.actor import start_pool
from tests.integration.pool.conftest import actor

SOON = 2.0


@contextmanager
def node_that_offers(resource: str) -> Iterator[str]:
    """A second node of the tests' cluster; gives its id."""
    nodes = Cluster(shutdown_at_exit=False)
    nodes.head_node = ray._private.worker._global_node
    node = nodes.add_node(num_cpus=0, resources={resource: 1}, object_store_memory=80 * 2**20)
    try:
        yield node.node_id
    finally:
        nodes.remove_node(node)


def node_of(shard: str, namespace: str) -> str:
    def node(_: object) -> str:
        return str(ray.get_runtime_context().get_node_id())

    return str(ray.get(actor(shard, namespace).__ray_call__.remote(node)))


def ids(plan: PoolPlan, namespace: str) -> list[str]:
    return [actor(shard, namespace)._actor_id.hex() for shard in plan.shard_names()]


async def test_shards_live_on_the_node_that_offers_the_resource_and_come_back_with_it(
    namespace: str, tmp_path: Path
) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path), resource="journals")
    with node_that_offers("journals") as node:
        assert start_pool(plan, namespace) == plan
        assert {node_of(shard, namespace) for shard in plan.shard_names()} == {node}
        await PoolClient(plan.name, namespace).register_trajectory(Registration("t", "p"))
        made = ids(plan, namespace)
    with pytest.raises(PoolUnavailable, match="no Ray node offers the resource 'journals'"):
        start_pool(plan, namespace, timeout=SOON)
    with node_that_offers("journals") as another:
        assert start_pool(plan, namespace) == plan
        assert {node_of(shard, namespace) for shard in plan.shard_names()} == {another}
        assert ids(plan, namespace) == made
        assert await PoolClient(plan.name, namespace).knows("t", "p")


def test_shards_without_journals_spread_over_all_nodes_that_offer_the_resource(namespace: str) -> None:
    plan = PoolPlan(shards=4, resource="several")
    with node_that_offers("several") as first, node_that_offers("several") as second:
        start_pool(plan, namespace)
        assert {node_of(shard, namespace) for shard in plan.shard_names()} == {first, second}


def test_a_resource_that_no_node_offers_is_named_with_the_remedy_and_leaves_no_shard_waiting(namespace: str) -> None:
    with pytest.raises(PoolUnavailable) as info:
        start_pool(PoolPlan(shards=2, resource="nowhere"), namespace, timeout=SOON)
    assert str(info.value) == (
        "DataPool 'data_pool' did not start within 2 s: no Ray node offers the resource 'nowhere'. Start the node that "
        "has the journals' volume with: ray start --resources='{\"nowhere\": 1}'"
    )
    plan = PoolPlan(shards=2)
    assert start_pool(plan, namespace, timeout=60.0) == plan
