"""What a DataPool is made of."""

from dataclasses import dataclass, field

from stepwell.pool.api.plan import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Every shard knows all of it, so that any of them can tell a client."""

    name: str = "data_pool"
    shards: int = 1
    limits: Limits = field(default_factory=Limits)
    journal: str | None = None
    """Folder of the shards' journals; None keeps the pool in memory alone."""
    archive: str | None = None
    """Folder or fsspec URL that trained groups leave for, as Parquet."""
    resource: str | None = None
    """Custom Ray resource of the nodes that shards may run on; None is any node."""

    def shard_names(self) -> tuple[str, ...]:
        """The first has the pool's own name, so that whoever knows that finds the rest."""
        return (self.name, *(f"{self.name}-{n}" for n in range(1, self.shards)))
