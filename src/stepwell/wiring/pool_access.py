"""How a process that joins Ray itself reaches the DataPool."""

from stepwell.config.rewards import RewardSettings
from stepwell.config.sections import PoolSection
from stepwell.pool.client import PoolClient
from stepwell.pool.client.ray_cluster import join_ray


def join_pool(settings: PoolSection | RewardSettings) -> PoolClient:
    join_ray(settings.ray_address, settings.ray_namespace)
    return PoolClient(settings.data_pool_name, settings.ray_namespace)
