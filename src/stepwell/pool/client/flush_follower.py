"""A gateway's side of completions: it sends what it holds of a trajectory, or tells its calls, when a shard asks.

It waits for its topic at each shard, and shows itself there when the topic is posted, or after the seconds that the
shard has said.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.producing import TELL_CALLS, HeldCalls, Repeats
from stepwell.pool.api.transport import UNSEEN, flush_topic
from stepwell.pool.client.shards import PLAN_AGE, ShardSet
from stepwell.pool.shard.operation import Operation
from stepwell.pool.slices.producing import ShowItself, TakeRequests, TellCalls

log = logging.getLogger("stepwell.pool")

RETRY_PAUSE = 0.5
LEAVE_TIMEOUT = 2.0

Flush = Callable[[str], Awaitable[None]]
Held = Callable[[], HeldCalls]
AskShard = Callable[[Operation[Any], str], Awaitable[Any]]


class FlushFollower:
    """Follows the requests of every shard, also of those that join the pool later."""

    def __init__(self, shards: ShardSet, ask: AskShard) -> None:
        self.gateway = ""
        """The name by which shards know this gateway; empty until it follows their requests."""
        self._shards = shards
        self._ask = ask
        self._serving: set[tuple[str, str]] = set()
        """What shards have asked for."""
        self._told: dict[str, int] = {}
        """By shard: `HeldCalls.missed` as it was when the shard was last told all calls."""

    async def run(self, flush: Flush, held: Held, gateway: str = "") -> None:
        """Until cancelled. Each process has a name of its own, so that one that is started again does not pass for the
        one that died. What stands before the dot says whose steps it has taken over."""
        self.gateway = ".".join(filter(None, (gateway, uuid4().hex)))
        followed: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as following:
            while True:
                names = await self._names()
                for shard in [shard for shard in followed if shard not in names]:
                    followed.pop(shard).cancel()
                for shard in [shard for shard in names if shard not in followed]:
                    followed[shard] = following.create_task(self._follow(shard, flush, held, following))
                await self._shards.next_plan(PLAN_AGE)

    async def leave(self) -> None:
        """The gateway ends, and holds nothing. A shard that does not hear it takes it for dead some time later."""
        with suppress(PoolUnavailable, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await self._shards.call_all(lambda shard: shard.leave(self.gateway))

    async def _names(self) -> tuple[str, ...]:
        while True:
            try:
                return await self._shards.names()
            except PoolUnavailable:
                await asyncio.sleep(RETRY_PAUSE)

    async def _follow(self, shard: str, flush: Flush, held: Held, following: asyncio.TaskGroup) -> None:
        topic, revision = flush_topic(self.gateway), UNSEEN
        answered_at, is_called = time.monotonic(), True
        while True:
            calls = held()
            has_told = not calls.is_late and calls.missed == self._told.get(shard, 0)
            take = TakeRequests if is_called else ShowItself
            try:
                requests = await self._ask(take(self.gateway, time.monotonic() - answered_at, has_told), shard)
                answered_at = time.monotonic()
                for trajectory_uid in requests.trajectory_uids:
                    if (shard, trajectory_uid) not in self._serving:
                        self._serving.add((shard, trajectory_uid))
                        following.create_task(self._serve(shard, trajectory_uid, flush, held))
                news = await self._shards.wait_news(shard, {topic: revision}, requests.pause) if requests.pause else {}
            except Exception as failure:  # noqa: BLE001 - a gateway that stops asking would count as dead
                log.debug("shard %s does not tell what to flush: %s", shard, failure)
                await asyncio.sleep(RETRY_PAUSE)
                continue
            is_called = topic in news or not requests.pause
            if topic in news:
                revision = news[topic].revision

    async def _serve(self, shard: str, trajectory_uid: str, flush: Flush, held: Held) -> None:
        """If it fails, the shard asks again."""
        try:
            if trajectory_uid == TELL_CALLS:
                await self._tell(shard, held())
                return
            await flush(trajectory_uid)
            await self._shards.at(shard).flushed(self.gateway, [trajectory_uid])
        except Exception as failure:  # noqa: BLE001 - see above
            log.warning("shard %s waits for what is held of %s: %s", shard, trajectory_uid, failure)
        finally:
            self._serving.discard((shard, trajectory_uid))

    async def _tell(self, shard: str, held: HeldCalls) -> None:
        calls = [replace(call, gateway=self.gateway, repeats=Repeats.NONE) for call in held.calls]
        await self._ask(TellCalls(self.gateway, calls), shard)
        self._told[shard] = held.missed
