"""What serves the policy: as this process knows it, and as it brings it to the shards.

- A change arrives as soon as the pool has it, as long as `ServingWatch.follow` runs.
- Only the newest version is delivered. A shard never gets an older one after a newer one, and one that is away gets it
  when it is back. The version is remembered in this process only.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from stepwell.errors import Conflict, PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import Serving
from stepwell.pool.api.transport import SERVING, SYNC, UNSEEN, ActorFailed
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.slices.policy import AnnounceSync, ReportEngines, WhyUnreported

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
