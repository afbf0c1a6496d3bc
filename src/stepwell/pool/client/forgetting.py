"""How a subject's data, and what is too old, is removed from all shards of a pool."""

import asyncio
from collections.abc import Sequence

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.forgetting import Overdue, ShardReceipt
from stepwell.pool.client.shards import ShardClient

FORGET_TIMEOUT = 3600.0
"""Seconds. Large archives are read as a whole."""


class ForgettingClient(ShardClient):
    async def forget(self, subject: str, *, timeout: float = FORGET_TIMEOUT) -> list[ShardReceipt]:
        """Remove everything of a subject from every shard. It can be repeated, and goes on where it was.

        PoolUnavailable if a shard does not answer, or is not done: it goes on by itself. Names that one shard found are
        told to the others: a late reward may be at another shard than its trajectory.
        """
        names = await self.shards.names()
        receipts = await self._ask(names, subject, (), timeout)
        found = {name for receipt in receipts for name in receipt.names}
        lacking = [receipt.shard for receipt in receipts if not found <= set(receipt.names)]
        if lacking:
            await self._ask(lacking, subject, sorted(found), timeout)
            receipts = await self._ask(names, subject, (), timeout)
        if waiting := [receipt.shard for receipt in receipts if not receipt.is_done]:
            raise PoolUnavailable(f"{', '.join(waiting)} will go on with it; ask again for the receipt")
        return receipts

    async def forget_overdue(self, seconds: float, *, timeout: float = FORGET_TIMEOUT) -> list[ShardReceipt]:
        """Remove everything that is older than that, and what is older than its own retention, from every shard.

        PoolUnavailable if a shard does not answer: it goes on by itself. Each run has a receipt of its own.
        """
        names = await self.shards.names()
        return await asyncio.gather(*(self.shards.at(name, timeout=timeout).forget_overdue(seconds) for name in names))

    async def overdue(self, *, timeout: float = FORGET_TIMEOUT) -> list[Overdue]:
        """What each shard keeps though it is too old by the wall clock: the pool was off, or the clock is wrong."""
        names = await self.shards.names()
        return await asyncio.gather(*(self.shards.at(name, timeout=timeout).overdue() for name in names))

    async def forget_kept_back(self, *, timeout: float = FORGET_TIMEOUT) -> list[ShardReceipt]:
        """Remove it: the clock is right."""
        names = await self.shards.names()
        return await asyncio.gather(*(self.shards.at(name, timeout=timeout).forget_kept_back() for name in names))

    async def _ask(
        self, shards: Sequence[str], subject: str, also: Sequence[str], timeout: float
    ) -> list[ShardReceipt]:
        return await asyncio.gather(*(self.shards.at(name, timeout=timeout).forget(subject, also) for name in shards))
