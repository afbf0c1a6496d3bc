from stepwell.pool.actors import start_pool

from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient


def started(plan: PoolPlan, namespace: str) -> PoolClient:
    start_pool(plan, namespace)
    return PoolClient(plan.name, namespace)
