"""What serves the policy, as this process knows it: the newest answer of the first shard, and what engines report.

A change arrives as soon as the pool has it, as long as `follow` runs.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress

from stepwell.errors import Conflict, PoolUnavailable
from stepwell.pool.api.news import SERVING, SYNC, UNSEEN
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.api.transport import ActorFailed
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.slices.policy import AnnounceSync, ReportEngines, WhyUnreported

SERVING_RETRY_PAUSE = 1.0
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
