"""Groups for a trainer that is killed many times: however far a life came, the next one has some to train."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stepwell.pool.client import PoolClient

NEVER = 1_000_000
"""The last update of a life that is to be killed: it must not end by itself before."""


@dataclass(slots=True)
class GroupsAhead:
    client: PoolClient
    channel: str
    add: Callable[[PoolClient, int], Awaitable[None]]
    """Adds the group of that number: one step for each of its rollouts."""
    rollouts: int
    added: int = 0

    async def held(self) -> int:
        channel = (await self.client.stats()).channels.get(self.channel)
        return channel.held.steps // self.rollouts if channel else 0

    async def top_up(self, ahead: int) -> None:
        """Until the pool holds so many."""
        for number in range(self.added, self.added + ahead - await self.held()):
            await self.add(self.client, number)
            self.added += 1
