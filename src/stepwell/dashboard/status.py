"""The status of the pool, its channels, the gateways and the engines."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from stepwell.common.coalescing import SharedAnswer
from stepwell.dashboard.gateway_monitor import EngineReading, GatewayMonitor, GatewayNow
from stepwell.dashboard.index.follower import PoolFollower
from stepwell.dashboard.index.texts import ConversationTexts
from stepwell.dashboard.index.trajectories import TrajectoryIndex
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.stats import ChannelStats, PoolStats, ScoringStats, StepCount


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDescription:
    """How the pool was created."""

    name: str
    shards: int
    journal: str | None
    archive: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNow:
    name: str
    shards: int
    journal: str | None
    archive: str | None
    policy_version: int
    submitted: int
    leases: int
    forks: int
    refused: Mapping[str, int]
    quarantined: Mapping[str, int]
    scoring: ScoringStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelNow:
    name: str
    groups: int
    ready_groups: int
    trajectories: int
    nbytes: int
    history_groups: int
    held: StepCount
    accepted: StepCount
    shipped: StepCount
    dropped: Mapping[str, StepCount]
    left_out: Mapping[str, StepCount]
    oldest_age: float
    """Seconds since its oldest group was opened; 0 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexNow:
    trajectories: int
    texts: int
    behind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusNow:
    now: float
    version: str
    pool: PoolNow | None
    channels: Sequence[ChannelNow]
    gateways: Sequence[GatewayNow]
    engines: Sequence[EngineReading]
    index: IndexNow
    pool_error: str | None


class StatusQuery:
    def __init__(
        self,
        description: PoolDescription,
        stats: SharedAnswer[PoolStats],
        gateways: GatewayMonitor,
        index: TrajectoryIndex,
        texts: ConversationTexts,
        follower: PoolFollower,
    ) -> None:
        self._description = description
        self._stats = stats
        self._gateways = gateways
        self._index = index
        self._texts = texts
        self._follower = follower

    async def read(self, *, fresh: bool = False) -> StatusNow:
        """The status is some seconds old, unless `fresh`."""
        stats, error = None, self._follower.error
        if fresh:
            await self._gateways.poll()
        try:
            stats = await self._stats.get(fresh=fresh)
        except PoolUnavailable as failure:
            error = str(failure)
        now = time.time()
        return StatusNow(
            now=now,
            version=version("stepwell"),
            pool=None if stats is None else _pool(self._description, stats),
            channels=[] if stats is None else _channels(stats, self._index.oldest_held(), now),
            gateways=[watched.now for watched in self._gateways.watched],
            engines=self._gateways.engines(),
            index=IndexNow(trajectories=len(self._index), texts=len(self._texts), behind=self._follower.behind),
            pool_error=error,
        )


def _pool(description: PoolDescription, stats: PoolStats) -> PoolNow:
    return PoolNow(
        name=description.name,
        shards=description.shards,
        journal=description.journal,
        archive=description.archive,
        policy_version=stats.policy_version,
        submitted=stats.submitted,
        leases=stats.leases,
        forks=stats.forks,
        refused=stats.refused,
        quarantined=stats.quarantined,
        scoring=stats.scoring,
    )


def _channels(stats: PoolStats, oldest: Mapping[str, float], now: float) -> list[ChannelNow]:
    return [_channel(name, found, max(0.0, now - oldest.get(name, now))) for name, found in stats.channels.items()]


def _channel(name: str, stats: ChannelStats, oldest_age: float) -> ChannelNow:
    return ChannelNow(
        name=name,
        groups=stats.groups,
        ready_groups=stats.ready_groups,
        trajectories=stats.trajectories,
        nbytes=stats.nbytes,
        history_groups=stats.history_groups,
        held=stats.held,
        accepted=stats.accepted,
        shipped=stats.shipped,
        dropped=stats.dropped,
        left_out=stats.left_out,
        oldest_age=oldest_age,
    )
