"""What a process follows at the shards: what serves the policy, and, as a gateway, what it is asked to send.

- A change of what serves the policy arrives as soon as the pool has it, as long as `ServingWatch.follow` runs.
- Only the newest version is delivered. A shard never gets an older one after a newer one, and one that is away gets it
  when it is back. The version is remembered in this process only.
- A gateway waits for its topic at each shard, and shows itself there when the topic is posted, or after the seconds
  that the shard has said. It sends what it holds of a trajectory, or tells its calls, when a shard asks.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from stepwell.errors import Conflict, PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import Serving
from stepwell.pool.api.producing import TELL_CALLS, HeldCalls, Repeats
from stepwell.pool.api.transport import SERVING, SYNC, UNSEEN, ActorFailed, flush_topic
from stepwell.pool.client.shards import PLAN_AGE, ShardSet
from stepwell.pool.shard.operation import Operation
from stepwell.pool.slices.policy import AnnounceSync, ReportEngines, WhyUnreported
from stepwell.pool.slices.producing import ShowItself, TakeRequests, TellCalls

log = logging.getLogger("stepwell.pool")

SERVING_RETRY_PAUSE = 1.0
DELIVERY_RETRY_PAUSE = 0.5
REPORT_TIMEOUT = 0.5
"""Seconds that a question about what engines report may take."""
REPORT_WAIT = 5.0
"""Seconds in which gateways must have seen a new version of an engine; they look twice a second. Without any answer in
this time, versions are not checked."""
REPORT_PAUSE = 0.1
ANNOUNCE_INTERVAL = 5.0
"""Seconds in which a trainer is announced once. A first shard that restarts has not heard of it for so long at most."""
NO_REPORTS = (PoolUnavailable, ActorFailed)
"""The first shard is away, or of an older release."""
RETRY_PAUSE = 0.5
LEAVE_TIMEOUT = 2.0

Flush = Callable[[str], Awaitable[None]]
Held = Callable[[], HeldCalls]
AskShard = Callable[[Operation[Any], str], Awaitable[Any]]


class ServingWatch:
    def __init__(self, shards: ShardSet) -> None:
        self.newest: Serving | None = None
        """None before the pool's first answer."""
        self.sync_expected: bool | None = None
        """A trainer lives that syncs weights, as the pool has last told; None while it tells nothing."""
        self._shards = shards
        self._changed = asyncio.Event()
        """Replaced with every change."""
        self._reported: tuple[str, str, Mapping[str, int | None]] | None = None
        """What the shard with this epoch knows of the engines of a gateway."""
        self._announced_at = -math.inf

    async def after(self, seen: Serving | None) -> Serving:
        while self.newest is None or self.newest == seen:
            await self._changed.wait()
        return self.newest

    def note(self, serving: Serving) -> None:
        """An answer that was on its way while a change was made here may be older than what is known."""
        if self.newest is not None and serving.is_older_than(self.newest):
            return
        self.newest = serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        seen = dict.fromkeys((SERVING, SYNC), UNSEEN)
        while True:
            try:
                news = await self._shards.wait_news(self._shards.pool, seen)
            except PoolUnavailable:
                self.sync_expected = None
                seen[SYNC] = UNSEEN
                await asyncio.sleep(SERVING_RETRY_PAUSE)
                continue
            seen |= {topic: item.revision for topic, item in news.items()}
            if SERVING in news:
                self.note(news[SERVING].value)
            if SYNC in news:
                self.sync_expected = news[SYNC].value

    async def report(self, gateway: str, versions: Mapping[str, int | None]) -> bool:
        """Tells the pool which version each engine of the gateway reports, unless it knows. Returns whether a trainer
        lives that syncs weights, True also if the pool cannot be asked."""
        epoch = "" if self.newest is None else self.newest.epoch
        if self.sync_expected is not None and self._reported == (gateway, epoch, versions):
            return self.sync_expected
        report = ReportEngines(gateway, dict(versions))
        try:
            expected = await self._shards.run(self._shards.pool, report, timeout=REPORT_TIMEOUT)
        except NO_REPORTS:
            return True
        self._reported = (gateway, epoch, dict(versions))
        return expected

    async def announce_sync(self) -> None:
        if time.monotonic() < self._announced_at + ANNOUNCE_INTERVAL:
            return
        with suppress(*NO_REPORTS):
            await self._shards.run(self._shards.pool, AnnounceSync(), timeout=REPORT_TIMEOUT)
            self._announced_at = time.monotonic()

    async def require_reported(self, version: int) -> None:
        """Conflict if no engine reports this version."""
        await self._shards.plan()
        deadline, why = time.monotonic() + REPORT_WAIT, None
        while time.monotonic() < deadline:
            with suppress(*NO_REPORTS):  # a late answer is no leave: the question is asked again
                why = await self._shards.run(self._shards.pool, WhyUnreported(version), timeout=REPORT_TIMEOUT)
                if why is None:
                    return
            await asyncio.sleep(REPORT_PAUSE)
        if why is not None:
            raise Conflict(why)


class VersionDelivery:
    """Brings the policy version, and which versions are withdrawn, to every shard."""

    def __init__(self, shards: ShardSet, note_serving: Callable[[Serving], None]) -> None:
        """`note_serving` is called with what the first shard answers."""
        self._shards = shards
        self._note_serving = note_serving
        self._version: int | None = None
        """The last that was to be delivered."""
        self._withdrawn: dict[str, tuple[int, ...]] = {}
        """By shard that does not know them yet."""
        self._told: set[str] = set()
        """Shards to which a version was sent, or is on its way."""
        shards.on_new_plan.append(self._tell_new_shards)
        self._sending: dict[str, asyncio.Task[None]] = {}
        """By shard, until it has the newest version."""

    async def deliver(self, version: int) -> None:
        """Returns when all shards have it, or, after `part_timeout`, as soon as one has it. If none answers for as long
        as a call may take, it is delivered later all the same."""
        await self._deliver(version, await self._shards.names(), self._shards.part_timeout)

    async def deliver_decided(self, serving: Serving) -> None:
        """To the other shards, what the first one has decided. Returns when they have it, or after the time that a call
        may take: who decided may end soon after, and then nobody brings it to them."""
        others = [name for name in await self._shards.names() if name != self._shards.pool]
        if others:
            self._withdrawn |= dict.fromkeys(others, serving.withdrawn)
            await self._deliver(serving.policy_version, others, self._shards.timeout)

    async def _deliver(self, version: int, names: Sequence[str], timeout: float) -> None:
        self._version = version
        for name in names:
            self._start(name)
        sending = [self._sending[name] for name in names]
        done, late = await asyncio.wait(sending, timeout=timeout)
        if not done:
            done, late = await asyncio.wait(sending, timeout=self._shards.timeout, return_when=asyncio.FIRST_COMPLETED)
        for sent in done:
            sent.result()  # what a shard refuses with is for the caller
        if late:
            missing = ", ".join(name for name in names if self._sending.get(name) in late)
            log.warning("policy version %d will be delivered to %s when it is back", version, missing)

    def _tell_new_shards(self, plan: PoolPlan) -> None:
        """A shard that has joined the pool since the last version."""
        for name in plan.shard_names():
            if self._version is not None and name not in self._told:
                self._start(name)

    def _start(self, name: str) -> None:
        self._told.add(name)
        if name not in self._sending:
            self._sending[name] = asyncio.create_task(self._send(name))

    async def _send(self, name: str) -> None:
        sent: int | None = None
        try:
            while self._version is not None and (sent != self._version or name in self._withdrawn):
                version, withdrawn = self._version, self._withdrawn.get(name)
                try:
                    serving = await self._shards.at(name).set_policy_version(version, withdrawn)
                    sent = version
                    if self._withdrawn.get(name) == withdrawn:
                        self._withdrawn.pop(name, None)
                    if name == self._shards.pool:
                        self._note_serving(serving)
                except PoolUnavailable:
                    await asyncio.sleep(DELIVERY_RETRY_PAUSE)
        finally:
            del self._sending[name]


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
