"""Changing the number of shards of a pool that runs.

- The first shard decides: its plan is in force. All others, and all clients, follow it.
- New shards run before the plan names them. A shard that goes runs until every client has had time to notice.
- Each step may be repeated, so a change that was interrupted goes on with the next look.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from stepwell.errors import Conflict, PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.transport import ActorAway, ActorMissing, ActorTransport

log = logging.getLogger("stepwell.pool")

LOOK_INTERVAL = 5.0
"""Seconds between two looks whether the shards that go are empty."""
DRAIN_GRACE = 60.0
"""Seconds for which an empty shard is still asked: a call that was answered may be repeated."""
LEAVE_DELAY = 15.0
"""Seconds in which clients notice that a shard is no longer part of the pool, before it ends."""
CALL_TIMEOUT = 10.0
LOG_INTERVAL = 60.0


async def reshard(
    transport: ActorTransport, plan: PoolPlan, shards: int, start: Callable[[PoolPlan], Awaitable[None]]
) -> PoolPlan:
    """New groups go to so many shards from now on. `start` starts the shards of a plan that do not run."""
    changed = plan.resharded(shards)
    if plan.nodes:
        added = len(changed.shard_names()) - len(plan.nodes)
        changed = replace(changed, nodes=(*plan.nodes, *plan.nodes[:1] * added))
    await start(changed)
    serving = await transport.call(plan.name, "serving", (), {})
    forgotten = await transport.call(plan.name, "forgotten_subjects", (), {})
    for name in changed.shard_names()[len(plan.shard_names()) :]:
        await transport.call(name, "set_policy_version", (serving.policy_version, serving.withdrawn), {})
        for policy in serving.channels:
            if policy.adapter:
                await transport.call(name, "set_adapter", (policy.channel, policy.adapter, policy.version), {})
        await transport.call(name, "adopt_forgotten", (forgotten,), {})
    in_force: PoolPlan = await transport.call(plan.name, "adopt_plan", (changed,), {})
    if in_force.layouts != changed.layouts:
        raise Conflict(f"the shards of DataPool {plan.name!r} were changed by another command; run it again")
    await asyncio.gather(*(_tell(transport, name, in_force) for name in in_force.shard_names()[1:]))
    return in_force


class DrainWatch:
    """Ends a change: former layouts are forgotten when their shards are empty, and shards that go are ended."""

    def __init__(
        self,
        transport: ActorTransport,
        pool: str,
        end: Callable[[Sequence[str]], Awaitable[None]],
        *,
        grace: float = DRAIN_GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end` ends shards that are no longer part of the pool."""
        self._transport = transport
        self._pool = pool
        self._end = end
        self._grace = grace
        self._clock = clock
        self._empty_since: float | None = None
        self._logged_at = 0.0
        self._left_at: float | None = clock()
        """When shards may have left the pool; None if all of these are ended."""

    async def look(self) -> None:
        """Whatever it raises, the next look goes on."""
        plan: PoolPlan = await self._call(self._pool, "plan")
        if plan.draining:
            if await self._is_drained(plan):
                await self._call(self._pool, "adopt_plan", plan.drained())
                self._empty_since, self._left_at = None, self._clock()
        elif self._left_at is not None and self._clock() >= self._left_at + LEAVE_DELAY:
            await self._end_left(plan)

    async def _end_left(self, plan: PoolPlan) -> None:
        """Shards that the plan does not name, except those that were started for a change that only begins."""
        await asyncio.gather(*(self._call(name, "adopt_plan", plan) for name in plan.shard_names()))
        left: list[str] = []
        with suppress(ActorMissing):
            for index in count(plan.shards):
                found: PoolPlan = await self._call(name := f"{plan.name}-{index}", "plan")
                if found.name == plan.name and found.revision < plan.revision:  # no pool of a similar name
                    left.append(name)
        if left:
            await self._end(left[::-1])  # the last one first, so that the others are found again
            log.info("DataPool %r has %d shards; ended: %s", plan.name, plan.shards, ", ".join(left))
        self._left_at = None

    async def _is_drained(self, plan: PoolPlan) -> bool:
        """Is it some time ago that the last group of a former layout left?"""
        names = plan.shard_names()
        await asyncio.gather(*(self._call(name, "adopt_plan", plan) for name in names))
        left = await asyncio.gather(*(self._call(name, "undrained") for name in names))
        now = self._clock()
        if any(left):
            self._empty_since = None
            if now >= self._logged_at + LOG_INTERVAL:
                self._logged_at = now
                log.info("DataPool %r changes its shards: %d groups are left on former ones", plan.name, sum(left))
            return False
        self._empty_since = now if self._empty_since is None else self._empty_since
        return now >= self._empty_since + self._grace

    async def _call(self, shard: str, method: str, *args: object) -> Any:
        async with asyncio.timeout(CALL_TIMEOUT):
            return await self._transport.call(shard, method, args, {})


async def _tell(transport: ActorTransport, name: str, plan: PoolPlan) -> None:
    """A shard that is away is told later: by a client, or by the watch of the first shard."""
    try:
        await transport.call(name, "adopt_plan", (plan,), {})
    except (ActorAway, PoolUnavailable) as failure:
        log.warning("shard %s will follow the plan when it is back: %s", name, failure)
