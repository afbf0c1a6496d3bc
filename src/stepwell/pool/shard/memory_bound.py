"""The bound of what a shard holds where its plan gives none."""

from dataclasses import replace

from stepwell.pool.api.plan import Limits, PoolPlan

MEMORY_SHARE = 1 / 8
"""Of the memory of a node: what the shards of a pool may hold in one channel. There may be several channels, and the
node has other work."""


def bounded_limits(plan: PoolPlan, memory: int) -> Limits:
    """The plan's, with a bound for bytes. `memory` is in bytes. All shards of the pool may be on one node."""
    if plan.limits.max_bytes is not None:
        return plan.limits
    return replace(plan.limits, max_bytes=int(memory * MEMORY_SHARE) // plan.shards)
