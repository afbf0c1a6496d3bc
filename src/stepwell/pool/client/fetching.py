"""A batch from several shards: the oldest that are ready anywhere, under one lease."""

import asyncio
import heapq
import time
from dataclasses import replace
from uuid import uuid4

from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.api.leasing import BatchRequest, HasLeases, Order, ReadySummary, Settlement
from stepwell.pool.client.batch import Batch, concat
from stepwell.pool.client.shards import PATIENCE, ShardSet

PEEK_PATIENCE = 2.0
"""Seconds a shard that is up may take to answer; one that is restarting is not waited for at all."""
PARK = 1.0


async def fetch(shards: ShardSet, wanted: BatchRequest, timeout: float, lease: float) -> Batch:
    names = await shards.names()
    if len(names) == 1:
        args = (wanted, timeout, lease, uuid4().hex)
        only: Batch = await shards.ask(names[0], "fetch_batch", *args, patience=timeout + PATIENCE)
        return only
    return await _Gathering(shards, names, wanted, lease).run(timeout)


class _Gathering:
    """One fetch from many shards. What it has taken so far is under its lease."""

    def __init__(self, shards: ShardSet, names: tuple[str, ...], wanted: BatchRequest, lease: float) -> None:
        self._shards = shards
        self._names = names
        self._wanted = wanted
        self._lease = lease
        self._parts: list[Batch] = []
        self._left = wanted.count

    async def run(self, timeout: float) -> Batch:
        deadline = time.monotonic() + timeout
        while True:
            seen = await self._peek()
            chosen = {} if self._is_blind(seen) else _oldest(seen, self._left)
            enough = sum(chosen.values()) == self._left
            if enough:
                await asyncio.gather(*(self._take(name, count) for name, count in chosen.items()))
            if self._left == 0:
                return concat(self._parts)
            if time.monotonic() >= deadline:
                await self._give_up(timeout)
            if not enough:
                await self._park(seen, min(PARK, max(0.01, deadline - time.monotonic())))

    async def _peek(self) -> dict[str, ReadySummary]:
        """What each shard that answers could give."""

        async def peek(name: str) -> ReadySummary | None:
            try:
                answer: ReadySummary = await self._shards.ask(
                    name, "peek", self._of(self._left), patience=PEEK_PATIENCE, await_restart=False
                )
            except PoolUnavailable:
                return None
            return answer

        answers = zip(self._names, await asyncio.gather(*map(peek, self._names)), strict=True)
        return {name: answer for name, answer in answers if answer is not None}

    def _is_blind(self, seen: dict[str, ReadySummary]) -> bool:
        """In strict order, a shard that does not answer may hold the oldest."""
        return self._wanted.order is Order.STRICT and len(seen) < len(self._names)

    async def _take(self, name: str, count: int) -> None:
        """Each part has a lease of its own; a part that another consumer was quicker to get is looked for again."""
        part: Batch | None = await self._shards.ask(name, "take", self._of(count), self._lease, uuid4().hex)
        if part is not None:
            self._parts.append(part)
            self._left -= count

    async def _park(self, seen: dict[str, ReadySummary], timeout: float) -> None:
        waits = [
            asyncio.ensure_future(
                self._shards.ask(
                    name, "wait_change", peek.state, timeout, patience=timeout + PEEK_PATIENCE, await_restart=False
                )
            )
            for name, peek in seen.items()
        ]
        if not waits:
            await asyncio.sleep(timeout)
            return
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _give_up(self, timeout: float) -> None:
        for part in self._parts:
            await settle(self._shards, part, "nack")
        texts = await self._shards.ask_all("waiting_for", self._wanted)
        shown = "; ".join(f"{name}: {text}" for name, text in zip(self._names, texts, strict=True))
        raise FetchTimeout(f"waited {timeout:g} s over {len(self._names)} shards. {shown}")

    def _of(self, count: int) -> BatchRequest:
        return replace(self._wanted, count=count)


async def settle(shards: ShardSet, leased: HasLeases, how: str) -> Settlement:
    """Ack or nack every part; EXPIRED if any part was, for that is what its consumer must know."""
    answers = await asyncio.gather(*(shards.ask(shard, how, uid) for shard, uid in leased.leases))
    return max(answers, key=[Settlement.DONE, Settlement.UNKNOWN, Settlement.EXPIRED].index, default=Settlement.DONE)


def _oldest(seen: dict[str, ReadySummary], count: int) -> dict[str, int]:
    """How many to take from each shard, so that together they are the oldest."""
    limit = min((peek.nothing_after for peek in seen.values()), default=0.0)
    ages = ((age, name) for name, peek in seen.items() for age in peek.ages if age <= limit)
    chosen: dict[str, int] = {}
    for _, name in heapq.nsmallest(count, ages):
        chosen[name] = chosen.get(name, 0) + 1
    return chosen
