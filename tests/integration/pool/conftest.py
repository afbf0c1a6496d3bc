import os
from typing import Any

import ray

from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.actor import start_pool


def started(plan: PoolPlan, namespace: str) -> PoolClient:
    start_pool(plan, namespace)
    return PoolClient(plan.name, namespace)


def pid_of(shard: str, namespace: str) -> int:
    def pid(_: object) -> int:
        return os.getpid()

    return int(ray.get(actor(shard, namespace).__ray_call__.remote(pid)))


def actor(shard: str, namespace: str) -> Any:
    return ray.get_actor(shard, namespace)
