"""D11: the Atropos server and the pool's shards are SIGKILLed; the environment sends its groups again under the same
Idempotency-Key: they are in once."""

import os
import signal
from pathlib import Path

import httpx
from stepwell.pool.actors import start_pool

from rig.actors import pid_of
from rig.atropos.server import atropos_process, scored_group
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient


def test_a_group_that_is_sent_again_after_a_kill_is_in_once(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    plan = PoolPlan(shards=2, journal=str(tmp_path / "journals"))
    start_pool(plan, namespace)
    groups = [scored_group(first) for first in range(4)]
    answers = []
    for log in ("first.log", "second.log"):
        with atropos_process(tmp_path / log, ray_address=ray_cluster.address, ray_namespace=namespace) as server:
            url, sent = f"{server.url}/scored_data_list", {"Idempotency-Key": "these-four"}
            answers.append(httpx.post(url, json=groups, headers=sent, timeout=120).json())
            server.kill()
        for shard in plan.shard_names():
            os.kill(pid_of(shard, namespace), signal.SIGKILL)
    assert [answer.get("duplicates", 0) for answer in answers] == [0, 4]
    pool = DataPool(PoolClient("data_pool", namespace))
    assert len(pool.fetch_batch(4, timeout=60)) == 4
    assert pool.stats().channels["train"].held.steps == 0
