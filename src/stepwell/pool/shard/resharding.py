"""The shards of a pool that runs: changing their number, and creating those that Ray has lost.

- The first shard decides: only a plan that it adopts is in force. All others, and all clients, follow it.
- New shards run before the plan names them, and follow the plan in force until then. So no shard and no client ever has
  a plan that is not in force, and two plans with the same revision are the same.
- If the first shard has lost a plan that another one knows, it takes that over before the next change.
- A shard that goes runs until every client has had time to notice.
- Each step may be repeated, so a change that was interrupted goes on with the next look or with the next command.
- If Ray has lost its state and with it the pool, the pool is created again. With a journal, it continues from there.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import attrgetter
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
CALL_TIMEOUT = 30.0
LOG_INTERVAL = 60.0

KEEP_INTERVAL = 5.0
"""Seconds between two looks whether all shards exist."""
ANSWER_TIMEOUT = 10.0


async def reshard(
    transport: ActorTransport, plan: PoolPlan, shards: int, start: Callable[[PoolPlan, PoolPlan], Awaitable[None]]
) -> PoolPlan:
    """New groups go to so many shards from now on. `plan` is that of the first shard. `start(plan, changed)` starts the
    shards that `changed` has more than `plan` and that do not run yet; they follow `plan`."""
    plan = await _newest_plan(transport, plan)
    if plan.shards != shards:
        plan = await _change(transport, plan, shards, start)
    await asyncio.gather(*(_tell(transport, name, plan) for name in plan.shard_names()[1:]))
    return plan


async def _newest_plan(transport: ActorTransport, plan: PoolPlan) -> PoolPlan:
    """The newest that a shard knows, in force again. A shard that is away is not asked."""
    told = await asyncio.gather(*(_tell(transport, name, plan) for name in plan.shard_names()[1:]))
    unnamed: dict[str, PoolPlan] = {}
    with suppress(ActorAway, PoolUnavailable, TimeoutError):
        unnamed = await _unnamed_shards(transport, plan)
    newest = max((plan, *filter(None, told), *unnamed.values()), key=attrgetter("revision"))
    if newest.revision == plan.revision:
        return plan
    return await _newest_plan(transport, await _call(transport, plan.name, "adopt_plan", newest))


async def _change(
    transport: ActorTransport, plan: PoolPlan, shards: int, start: Callable[[PoolPlan, PoolPlan], Awaitable[None]]
) -> PoolPlan:
    changed = plan.resharded(shards)
    if plan.nodes:
        added = len(changed.shard_names()) - len(plan.nodes)
        changed = replace(changed, nodes=(*plan.nodes, *plan.nodes[:1] * added))
    await start(plan, changed)
    joining = changed.shard_names()[len(plan.shard_names()) :]
    told = [await _call(transport, name, "adopt_plan", plan) for name in joining]  # one that ran may have an older plan
    serving = await _call(transport, plan.name, "serving")
    tombstones = await _call(transport, plan.name, "tombstones")
    await _share_rows(transport, plan, changed)
    for name in joining:
        await _call(transport, name, "set_policy_version", serving.policy_version, serving.withdrawn)
        for policy in serving.channels:
            if policy.adapter:
                await _call(transport, name, "set_adapter", policy.channel, policy.adapter, policy.version)
        await _call(transport, name, "adopt_tombstones", tombstones)
    if all(following.layouts == plan.layouts for following in told):
        in_force: PoolPlan = await _call(transport, plan.name, "adopt_plan", changed)
        if in_force.layouts == changed.layouts:
            return in_force
    raise Conflict(f"the shards of DataPool {plan.name!r} were changed by another command; run it again")


async def _share_rows(transport: ActorTransport, plan: PoolPlan, changed: PoolPlan) -> None:
    """Later groups may have another shard than earlier ones of the same prompt: it gets what slices say of them. What
    a shard that is away shares stays with it."""
    for giver in plan.shard_names():
        with suppress(ActorAway, ActorMissing, PoolUnavailable, TimeoutError):
            shared = await _call(transport, giver, "shared_rows")
            for taker in changed.shard_names() if shared else ():
                await _call(transport, taker, "merge_rows", shared)


class DrainWatch:
    """Ends a change: former layouts are dropped when their shards are empty, and shards that go are ended."""

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
            if await self._all_follow(plan) and await self._is_drained(plan):
                await self._call(self._pool, "adopt_plan", plan.drained())
                self._empty_since, self._left_at = None, self._clock()
        elif self._may_have_left() and await self._all_follow(plan):
            await self._end_left(plan)

    def _may_have_left(self) -> bool:
        return self._left_at is not None and self._clock() >= self._left_at + LEAVE_DELAY

    async def _all_follow(self, plan: PoolPlan) -> bool:
        """False if a shard knows a newer plan, which the first one has lost. It is in force again."""
        told = await asyncio.gather(*(self._call(name, "adopt_plan", plan) for name in plan.shard_names()))
        newest = max(told, key=attrgetter("revision"))
        if newest.revision > plan.revision:
            await self._call(self._pool, "adopt_plan", newest)
        return bool(newest.revision == plan.revision)

    async def _end_left(self, plan: PoolPlan) -> None:
        """Shards that the plan does not name, except those that were started for a change that only begins."""
        unnamed = await _unnamed_shards(self._transport, plan)
        left = [name for name, found in unnamed.items() if found.revision < plan.revision]
        if left:
            await self._end(left[::-1])  # the last one first, so that the others are found again
            log.info("DataPool %r has %d shards; ended: %s", plan.name, plan.shards, ", ".join(left))
        self._left_at = None

    async def _is_drained(self, plan: PoolPlan) -> bool:
        """Is it some time ago that the last group of a former layout left?"""
        left = await asyncio.gather(*(self._call(name, "undrained") for name in plan.shard_names()))
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
        return await _call(self._transport, shard, method, *args)


async def _call(transport: ActorTransport, shard: str, method: str, *args: object) -> Any:
    async with asyncio.timeout(CALL_TIMEOUT):
        return await transport.call(shard, method, args, {})


async def _unnamed_shards(transport: ActorTransport, plan: PoolPlan) -> dict[str, PoolPlan]:
    """The plans of the shards that run though this plan does not name them."""
    found: dict[str, PoolPlan] = {}
    with suppress(ActorMissing):
        for index in count(len(plan.shard_names())):
            other: PoolPlan = await _call(transport, name := f"{plan.name}-{index}", "plan")
            if other.name == plan.name:  # no pool of a similar name
                found[name] = other
    return found


async def _tell(transport: ActorTransport, name: str, plan: PoolPlan) -> PoolPlan | None:
    """The plan that the shard follows now. One that is away is told later: by a client, or by the watch of the first
    shard."""
    try:
        told: PoolPlan = await _call(transport, name, "adopt_plan", plan)
    except (ActorAway, ActorMissing, PoolUnavailable, TimeoutError) as failure:
        log.warning("shard %s will follow the plan when it is back: %s", name, failure)
        return None
    return told


async def keep_pool(
    transport: ActorTransport,
    pool: str,
    create: Callable[[], Awaitable[None]],
    *,
    interval: float = KEEP_INTERVAL,
) -> None:
    """Until cancelled. A shard that is away is left alone: Ray restarts it."""
    while True:
        if missing := await _missing(transport, pool):
            log.warning("Ray has no %s; the pool is created", ", ".join(missing))
            await create()
        await asyncio.sleep(interval)


async def _missing(transport: ActorTransport, pool: str) -> list[str]:
    """The first shard names the others, whose number may change."""
    try:
        plan = await _plan(transport, pool)
    except ActorMissing:
        return [pool]
    missing = []
    for shard in () if plan is None else plan.shard_names()[1:]:
        try:
            await _plan(transport, shard)
        except ActorMissing:
            missing.append(shard)
    return missing


async def _plan(transport: ActorTransport, shard: str) -> PoolPlan | None:
    """None if the shard is away."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            plan: PoolPlan = await transport.call(shard, "plan", (), {})
            return plan
    except (ActorAway, PoolUnavailable, TimeoutError):
        return None
