from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.actor import start_pool


def started(plan: PoolPlan, namespace: str) -> PoolClient:
    start_pool(plan, namespace)
    return PoolClient(plan.name, namespace)
