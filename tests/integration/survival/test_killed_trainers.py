"""D8: a trainer that is SIGKILLed. What it had is back long before its lease ends, and its waiting fetch gets nothing.

`python -m benchmarks.survival --only killed_clients` measures how soon: in less than 15 s.
"""

import os
import subprocess
import sys
import time

from stepwell.pool.actors import start_pool

from rig.builders import make_step
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient

TRAINER = """
import sys, threading, time
from stepwell.pool.client import connect
address, namespace, lease = sys.argv[1:]
pool = connect(address=address, namespace=namespace)
batch = pool.fetch_batch(4, lease=float(lease))
threading.Thread(target=pool.fetch_batch, args=(2,), kwargs={"lease": float(lease), "timeout": 600.0}).start()
time.sleep(1.0)
print("has a batch and waits for another", flush=True)
"""
GROUPS = 4
LEASE = 600.0
BOUND = LEASE / 6
"""Seconds; other tests run beside it."""


async def rollout(client: PoolClient, prompt: str) -> None:
    await client.register_trajectory(Registration(f"t-{prompt}", prompt))
    assert await client.submit_steps([make_step(f"t-{prompt}", prompt)]) == [SubmitVerdict.ACCEPTED]
    assert await client.complete_trajectory(f"t-{prompt}", prompt, 1.0) is EndResult.COMPLETED


def test_what_a_killed_trainer_had_is_back_and_it_gets_nothing_more(ray_cluster: RayCluster, namespace: str) -> None:
    start_pool(PoolPlan(shards=2), namespace)
    client = PoolClient("data_pool", namespace)
    pool = DataPool(client)
    for n in range(GROUPS):
        pool._run(rollout(client, f"p{n}"))
    command = [sys.executable, "-c", TRAINER, ray_cluster.address, namespace, str(LEASE)]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "has a batch and waits for another\n"
        held = pool.stats().leases
        trainer.kill()
    killed_at = time.monotonic()
    assert held > 0
    for n in range(GROUPS, GROUPS + 2):
        pool._run(rollout(client, f"p{n}"))
    stats = pool.stats()
    assert stats.leases <= held, "the dead trainer took none"
    assert stats.channels["train"].ready_groups >= 2
    while stats.leases:
        assert time.monotonic() - killed_at < BOUND
        time.sleep(0.1)
        stats = pool.stats()
    assert stats.channels["train"].ready_groups == GROUPS + 2
