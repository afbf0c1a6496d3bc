"""How other processes reach the shards of a pool."""

from stepwell.pool.client.data_pool import DataPool, PoolClient, connect

__all__ = ["DataPool", "PoolClient", "connect"]
