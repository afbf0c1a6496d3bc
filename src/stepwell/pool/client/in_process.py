"""A pool in memory whose shards are in this process, without Ray: for the doctor, and for tests.

It is the real client and the real shards. Nothing of it outlives the process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.transport import ActorMissing
from stepwell.pool.client.pool_client import PoolClient
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.shard import Shard
from stepwell.pool.slices.all import SLICES


class InProcessTransport:
    """Calls shards of this process, by their names. Implements ActorTransport."""

    connections = 1

    def __init__(self, services: dict[str, ShardService]) -> None:
        self.services = services

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if shard not in self.services:
            raise ActorMissing(shard)
        return await getattr(self.services[shard], method)(*args, **kwargs)


def start_in_process(plan: PoolPlan) -> PoolClient:
    """A new pool of this plan. It is used in one event loop."""
    transport = InProcessTransport({})

    async def ask_decision(shard: str, decision_uid: str) -> Settlement:
        return await transport.services[shard].nack(decision_uid)

    for name in plan.shard_names():
        transport.services[name] = ShardService(Shard(plan, name, slices=SLICES, ask_decision=ask_decision))
    return PoolClient(plan.name, transport=transport)
