"""A gateway's side of completions: it sends what it holds of a trajectory, or tells its calls, when a shard asks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import uuid4

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.calls import TELL_CALLS
from stepwell.pool.client.shards import PLAN_AGE, ShardSet

log = logging.getLogger("stepwell.pool")

REQUEST_WAIT = 1.0
"""Seconds that one call waits for requests. The calls show that the gateway lives, and that it reaches the shard."""
RETRY_PAUSE = 0.5
LEAVE_TIMEOUT = 2.0

Flush = Callable[[str], Awaitable[None]]
Tell = Callable[[str], Awaitable[None]]
"""Tells a shard which calls are under way."""


class FlushFollower:
    """Follows the requests of every shard, also of those that join the pool later."""

    def __init__(self, shards: ShardSet) -> None:
        self.gateway = ""
        """The name by which shards know this gateway; empty until it follows their requests."""
        self._shards = shards
        self._serving: set[tuple[str, str]] = set()
        """What shards have asked for."""

    async def run(self, flush: Flush, tell: Tell, gateway: str = "") -> None:
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
                    followed[shard] = following.create_task(self._follow(shard, flush, tell, following))
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

    async def _follow(self, shard: str, flush: Flush, tell: Tell, following: asyncio.TaskGroup) -> None:
        calls = self._shards.at(shard, timeout=REQUEST_WAIT + self._shards.timeout)
        while True:
            try:
                requested = await calls.flush_requests(self.gateway, REQUEST_WAIT)
            except Exception as failure:  # noqa: BLE001 - a gateway that stops asking would count as dead
                log.debug("shard %s does not tell what to flush: %s", shard, failure)
                await asyncio.sleep(RETRY_PAUSE)
                continue
            for trajectory_uid in requested:
                if (shard, trajectory_uid) not in self._serving:
                    self._serving.add((shard, trajectory_uid))
                    following.create_task(self._serve(shard, trajectory_uid, flush, tell))

    async def _serve(self, shard: str, trajectory_uid: str, flush: Flush, tell: Tell) -> None:
        """If it fails, the shard asks again."""
        try:
            if trajectory_uid == TELL_CALLS:
                await tell(shard)
                return
            await flush(trajectory_uid)
            await self._shards.at(shard).flushed(self.gateway, [trajectory_uid])
        except Exception as failure:  # noqa: BLE001 - see above
            log.warning("shard %s waits for what is held of %s: %s", shard, trajectory_uid, failure)
        finally:
            self._serving.discard((shard, trajectory_uid))
