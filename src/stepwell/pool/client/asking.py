"""Operations travel to the shards that they are about, small ones in messages that they share."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, cast

from stepwell.common.coalescing import BatchSender
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import FlushNeeded
from stepwell.pool.api.shard_layout import LayoutDiffers
from stepwell.pool.client.group_routing import Rerouting, ask_owner, ask_owners
from stepwell.pool.client.shards import ShardClient, ShardSet
from stepwell.pool.shard.operation import LongOperation, MergedOperation, Operation, ShardRoute
from stepwell.pool.slices.forgetting import Forget, ForgetOverdue, merge_receipts

P = TypeVar("P")
R = TypeVar("R")

LONG_TIMEOUT = 3600.0
"""Seconds that a long operation may take at a shard, such as reading a large archive as a whole."""


class AskingClient(ShardClient):
    def __init__(self, shards: ShardSet) -> None:
        super().__init__(shards)
        self._senders: dict[tuple[str, int], BatchSender[Operation[Any], Any]] = {}
        """By shard and revision of the plan."""
        shards.on_new_plan.append(lambda _: self._senders.clear())

    async def ask(self, operation: Operation[R], *, timeout: float | None = None) -> R:
        """The answer of the shards that the operation is for. PoolUnavailable if there is none within `timeout`
        seconds, by default those of this client."""
        seconds = self.shards.timeout if timeout is None else timeout
        if isinstance(operation, MergedOperation):
            async with _limited(Rerouting(self.shards, seconds), seconds):
                await self.shards.plan()
            answer = await self.shards.ask_each(lambda name, _: self._ask_shard(operation, name, seconds))
            return cast("R", operation.merge(answer.by_shard, answer.missing))
        if operation.route is ShardRoute.FIRST:
            return await self._ask_shard(operation, self.shards.pool, seconds)
        ask, rerouting = ask_owners if operation.may_ask_all else ask_owner, Rerouting(self.shards, seconds)
        try:
            async with _limited(rerouting, seconds):
                return await ask(self.shards, operation.routed_by, partial(self.ask_at, operation), rerouting)
        except FlushNeeded:
            rerouting = Rerouting(self.shards, operation.flush_wait + self.shards.timeout)
            return await ask_owner(self.shards, operation.routed_by, partial(self._ask_flushed, operation), rerouting)

    async def ask_at(self, operation: Operation[R], shard: str, plan: PoolPlan) -> R:
        """The answer of one shard, which `plan` names."""

        async def send(operations: list[Operation[Any]]) -> Sequence[Any]:
            return await self.shards.at(shard).run(operations, **plan.stamp)

        if operation.is_large:
            (answer,) = await send([operation])
            if isinstance(answer, Exception):
                raise answer
            return cast("R", answer)
        sender = self._senders.get((shard, plan.revision))
        if sender is None:
            sender = BatchSender(send, patience=attrgetter("patience"))
            self._senders[shard, plan.revision] = sender
        return cast("R", await sender.submit(operation))

    async def ask_long(self, operation: LongOperation[P], *, timeout: float = LONG_TIMEOUT) -> list[P]:
        """The answers of all shards. PoolUnavailable if one does not answer; it goes on all the same."""
        names, parts = await self.shards.names(), list[P]()
        again: LongOperation[P] | None = operation
        while again is not None:
            asked = again
            parts = await asyncio.gather(*(self.shards.at(name, timeout=timeout).run_long(asked) for name in names))
            again = asked.again(parts)
        return parts

    async def forget(self, subject: str | None, older_than: float = 0.0) -> dict[str, Any]:
        """Remove everything of a subject, or everything that is older than so many seconds, for good. The receipt.
        PoolUnavailable if a shard does not answer, or is not done: it goes on by itself."""
        operation = ForgetOverdue(older_than) if subject is None else Forget(subject)
        return merge_receipts(await self.ask_long(operation), time.time())

    def hurry(self) -> None:
        """Operations that wait for others leave now."""
        for sender in self._senders.values():
            sender.hurry()

    async def _ask_shard(self, operation: Operation[R], shard: str, seconds: float) -> R:
        rerouting = Rerouting(self.shards, seconds)
        async with _limited(rerouting, seconds):
            while True:
                try:
                    return await self.ask_at(operation, shard, await self.shards.plan())
                except LayoutDiffers:
                    rerouting.refused_by.add(shard)
                await rerouting.agree()

    async def _ask_flushed(self, operation: Operation[R], shard: str, plan: PoolPlan) -> R:
        """After other gateways have sent what they hold."""
        calls = self.shards.at(shard, timeout=operation.flush_wait + self.shards.timeout)
        return cast("R", await calls.run_flushed(operation, operation.flush_wait, **plan.stamp))


@asynccontextmanager
async def _limited(rerouting: Rerouting, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise rerouting.failure() from None
