"""How other processes reach the shards of a pool. Importing it does not import Ray; see `ray_cluster`."""

from stepwell.pool.api.curation import Curation, CurationAction
from stepwell.pool.client.data_pool import DataPool, connect
from stepwell.pool.client.pool_client import PoolClient

__all__ = ["Curation", "CurationAction", "DataPool", "PoolClient", "connect"]
