"""A gateway's side of completions: it sends what it holds of a trajectory when a shard asks for it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import uuid4

from stepwell.errors import PoolUnavailable
from stepwell.pool.client.shards import PLAN_AGE, ShardSet

log = logging.getLogger("stepwell.pool")

REQUEST_WAIT = 1.0
"""Seconds that one call waits for requests. The calls show that the gateway lives, and that it reaches the shard."""
RETRY_PAUSE = 0.5
LEAVE_TIMEOUT = 2.0

Flush = Callable[[str], Awaitable[None]]


class FlushFollower:
    """Follows the requests of every shard, also of those that join the pool later."""

    def __init__(self, shards: ShardSet) -> None:
        self.gateway = ""
        """The name by which shards know this gateway; empty until it follows their requests."""
        self._shards = shards
        self._flushing: set[str] = set()
        """Trajectories that are being flushed."""

    async def run(self, flush: Flush, gateway: str = "") -> None:
        """Until cancelled."""
        self.gateway = gateway or uuid4().hex
        followed: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as following:
            while True:
                names = await self._names()
                for shard in [shard for shard in followed if shard not in names]:
                    followed.pop(shard).cancel()
                for shard in [shard for shard in names if shard not in followed]:
                    followed[shard] = following.create_task(self._follow(shard, flush, following))
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

    async def _follow(self, shard: str, flush: Flush, following: asyncio.TaskGroup) -> None:
        calls = self._shards.at(shard, timeout=REQUEST_WAIT + self._shards.timeout)
        while True:
            try:
                requested = await calls.flush_requests(self.gateway, REQUEST_WAIT)
            except Exception as failure:  # noqa: BLE001 - a gateway that stops asking would count as dead
                log.debug("shard %s does not tell what to flush: %s", shard, failure)
                await asyncio.sleep(RETRY_PAUSE)
                continue
            for trajectory_uid in requested:
                if trajectory_uid not in self._flushing:
                    self._flushing.add(trajectory_uid)
                    following.create_task(self._flush(shard, trajectory_uid, flush))

    async def _flush(self, shard: str, trajectory_uid: str, flush: Flush) -> None:
        """If it fails, the shard asks again."""
        try:
            await flush(trajectory_uid)
            await self._shards.at(shard).flushed(self.gateway, [trajectory_uid])
        except Exception as failure:  # noqa: BLE001 - see above
            log.warning("the steps of trajectory %s are not delivered yet: %s", trajectory_uid, failure)
        finally:
            self._flushing.discard(trajectory_uid)
