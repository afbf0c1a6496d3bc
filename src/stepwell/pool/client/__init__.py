"""How other processes reach the shards of a pool."""

from stepwell.pool.api.curation import Curation, CurationAction
from stepwell.pool.client.data_pool import DataPool, PoolClient, connect

__all__ = ["Curation", "CurationAction", "DataPool", "PoolClient", "connect"]
