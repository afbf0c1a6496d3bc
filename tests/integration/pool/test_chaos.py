"""A trainer may be killed: what it had comes back, once and in order."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rig.builders import make_step
from rig.ray_cluster import RayCluster
from stepwell.errors import FetchTimeout
from stepwell.pool.actors import start_pool
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient

TRAINER = """
import sys, time
from stepwell.pool.client import connect

address, namespace, lease = sys.argv[1:]
batch = connect(address=address, namespace=namespace).fetch_batch(2, lease=float(lease))
print(*batch.columns.uids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("shards", [1, 3])
async def test_what_a_killed_trainer_had_comes_back_once_and_in_order(
    ray_cluster: RayCluster, namespace: str, shards: int
) -> None:
    start_pool(PoolPlan(shards=shards), namespace)
    client = PoolClient("data_pool", namespace)
    for n in range(4):
        await client.register_trajectory(Registration(f"t{n}", f"p{n}"))
        assert await client.submit_steps([make_step(f"t{n}", f"p{n}", uid=f"s{n}")]) == [SubmitVerdict.ACCEPTED]
        await client.complete_trajectory(f"t{n}", f"p{n}", 1.0)
    with trainer(ray_cluster.address, namespace, lease=2.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["s0", "s1"]
        process.kill()
    pool = DataPool(client)
    batch = pool.fetch_batch(4, timeout=60.0, lease=60.0)
    assert batch.columns.uids == ["s0", "s1", "s2", "s3"]
    assert batch.attempts_G.tolist() == [1, 1, 0, 0]
    with pytest.raises(FetchTimeout):
        pool.fetch_batch(1, timeout=2.5)


@contextmanager
def trainer(address: str, namespace: str, lease: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", TRAINER, address, namespace, str(lease)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
