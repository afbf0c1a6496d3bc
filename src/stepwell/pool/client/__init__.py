"""How other processes reach the shards of a pool.

Ray reads its settings when it is imported, and `ray_cluster` sets them first. So the names below that need Ray are
loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepwell.pool.api.curation import Curation, CurationAction

if TYPE_CHECKING:
    from stepwell.pool.client.data_pool import DataPool, PoolClient, connect

__all__ = ["Curation", "CurationAction", "DataPool", "PoolClient", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("stepwell.pool.client.data_pool"), name)
