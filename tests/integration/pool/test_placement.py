"""Shards run where the journals are: on the node that offers the pool's resource, and nowhere else."""

from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.actors import actor, node_of
from rig.ray_nodes import joined_node
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient

SOON = 2.0


def ids(plan: PoolPlan, namespace: str) -> list[str]:
    return [actor(shard, namespace)._actor_id.hex() for shard in plan.shard_names()]


async def test_shards_live_on_the_node_that_offers_the_resource_and_come_back_with_it(
    namespace: str, tmp_path: Path
) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path), resource="journals")
    with joined_node(resources={"journals": 1}) as node:
        assert start_pool(plan, namespace) == plan
        assert {node_of(shard, namespace) for shard in plan.shard_names()} == {node}
        await PoolClient(plan.name, namespace).register_trajectory(Registration("t", "p"))
        made = ids(plan, namespace)
    with pytest.raises(PoolUnavailable, match="no Ray node offers the resource 'journals'"):
        start_pool(plan, namespace, timeout=SOON)
    with joined_node(resources={"journals": 1}) as another:
        assert start_pool(plan, namespace) == plan
        assert {node_of(shard, namespace) for shard in plan.shard_names()} == {another}
        assert ids(plan, namespace) == made
        assert await PoolClient(plan.name, namespace).channel_if_open("t", "p")


def test_shards_without_journals_spread_over_all_nodes_that_offer_the_resource(namespace: str) -> None:
    plan = PoolPlan(shards=4, resource="several")
    with joined_node(resources={"several": 1}) as first, joined_node(resources={"several": 1}) as second:
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
