"""Fetching a batch from one or several shards, oldest ready groups first, and ending its leases."""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.api.leasing import (
    BatchRequest,
    HasLeases,
    LeasedGroups,
    Order,
    ReadySummary,
    Settlement,
    merge_leased_groups,
)
from stepwell.pool.client.shards import ShardSet

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

PEEK_TIMEOUT = 2.0
"""Seconds. A shard that restarts is not waited for."""
MAX_WAIT = 1.0
"""Seconds between two looks at all shards."""
SETTLEMENT_ORDER = (Settlement.DONE, Settlement.UNKNOWN, Settlement.EXPIRED)
"""From good to bad."""


async def fetch_oldest(shards: ShardSet, request: BatchRequest, timeout: float, lease: float) -> LeasedGroups:
    """FetchTimeout says what is missing."""
    names = await shards.names()
    if len(names) == 1:
        shard = shards.at(names[0], timeout=timeout + shards.timeout)
        return await shard.fetch_batch(request, timeout, lease, uuid4().hex)
    return await _MultiShardFetch(shards, names, request, lease).run(timeout)


async def settle_leases(
    shards: ShardSet, leased: HasLeases, settle: Callable[["ShardService", str], Awaitable[Settlement]]
) -> Settlement:
    """End the lease of every part. EXPIRED if any part has expired, because the consumer must know that."""
    settlements = await asyncio.gather(*(settle(shards.at(shard), uid) for shard, uid in leased.leases))
    return max(settlements, key=SETTLEMENT_ORDER.index, default=Settlement.DONE)


class _MultiShardFetch:
    """One fetch from many shards. The parts that it has taken so far are leased."""

    def __init__(self, shards: ShardSet, names: tuple[str, ...], request: BatchRequest, lease: float) -> None:
        self._shards = shards
        self._names = names
        self._request = request
        self._lease = lease
        self._parts: list[LeasedGroups] = []
        self._missing = request.count

    async def run(self, timeout: float) -> LeasedGroups:
        deadline = time.monotonic() + timeout
        while True:
            summaries = await self._peek()
            counts = {} if self._may_miss_oldest(summaries) else _oldest(summaries, self._missing)
            is_enough = sum(counts.values()) == self._missing
            if is_enough:
                await asyncio.gather(*(self._take(name, count) for name, count in counts.items()))
            if self._missing == 0:
                return merge_leased_groups(self._parts)
            if time.monotonic() >= deadline:
                await self._give_up(timeout)
            if not is_enough:
                await self._wait_change(summaries, min(MAX_WAIT, max(0.01, deadline - time.monotonic())))

    async def _peek(self) -> dict[str, ReadySummary]:
        """What each shard that answers could hand out."""

        async def peek(name: str) -> ReadySummary | None:
            shard = self._shards.at(name, timeout=PEEK_TIMEOUT, await_restart=False)
            try:
                return await shard.peek(replace(self._request, count=self._missing))
            except PoolUnavailable:
                return None

        answers = zip(self._names, await asyncio.gather(*map(peek, self._names)), strict=True)
        return {name: answer for name, answer in answers if answer is not None}

    def _may_miss_oldest(self, summaries: dict[str, ReadySummary]) -> bool:
        """In strict order, a shard that does not answer may hold the oldest group."""
        return self._request.order is Order.STRICT and len(summaries) < len(self._names)

    async def _take(self, name: str, count: int) -> None:
        """Each part has its own lease. A part that another consumer took first stays missing."""
        shard, request = self._shards.at(name), replace(self._request, count=count)
        part = await shard.take(request, self._lease, uuid4().hex)
        if part is not None:
            self._parts.append(part)
            self._missing -= count

    async def _wait_change(self, summaries: dict[str, ReadySummary], timeout: float) -> None:
        """Until something may have become ready in one of the shards."""

        async def wait(name: str, state: int) -> None:
            shard = self._shards.at(name, timeout=timeout + PEEK_TIMEOUT, await_restart=False)
            await shard.wait_change(state, timeout)

        waits = [asyncio.create_task(wait(name, summary.state)) for name, summary in summaries.items()]
        if not waits:
            await asyncio.sleep(timeout)
            return
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _give_up(self, timeout: float) -> None:
        for part in self._parts:
            await settle_leases(self._shards, part, lambda shard, uid: shard.nack(uid))
        texts = await self._shards.call_all(lambda shard: shard.waiting_for(self._request))
        by_shard = "; ".join(f"{name}: {text}" for name, text in zip(self._names, texts, strict=True))
        raise FetchTimeout(f"waited {timeout:g} s over {len(self._names)} shards. {by_shard}")


def _oldest(summaries: dict[str, ReadySummary], count: int) -> dict[str, int]:
    """How many groups to take from each shard, so that together they are the oldest."""
    limit = min((summary.nothing_after for summary in summaries.values()), default=0.0)
    ages = ((age, name) for name, summary in summaries.items() for age in summary.ages if age <= limit)
    counts: dict[str, int] = {}
    for _, name in heapq.nsmallest(count, ages):
        counts[name] = counts.get(name, 0) + 1
    return counts
