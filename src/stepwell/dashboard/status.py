"""The status of the pool, its channels, the gateways and the engines."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version

from stepwell.dashboard.state import DashboardState
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.stats import ChannelStats, PoolStats

HIDDEN = ("channels", "ready_by_source")
"""Statistics that are not shown with the others: channels stand apart."""


async def read_status(state: DashboardState, *, fresh: bool = False) -> dict[str, object]:
    """The status is some seconds old, unless `fresh` or the pool, or part of it, has just been found away."""
    stats, error = None, state.follower.error
    polling = asyncio.create_task(state.gateways.poll()) if fresh else None
    try:
        stats = await state.stats.get(fresh=fresh or error is not None)
    except PoolUnavailable as failure:
        error = str(failure)
    if polling is not None:
        await polling
    now = time.time()
    return {
        "now": now,
        "version": version("stepwell"),
        "pool": None if stats is None else _pool(state.plan, stats),
        "channels": [] if stats is None else _channels(stats, state.index.oldest_held(), now),
        "gateways": [watched.now for watched in state.gateways.watched],
        "engines": state.gateways.engines(),
        "index": {"trajectories": len(state.index), "texts": len(state.texts), "behind": state.follower.behind},
        "pool_error": error,
    }


def _pool(plan: PoolPlan, stats: PoolStats) -> dict[str, object]:
    created = {"name": plan.name, "journal": plan.journal_name, "archive": plan.archive}
    return {**created, **_shown(stats)}


def _channels(stats: PoolStats, oldest: Mapping[str, float], now: float) -> list[dict[str, object]]:
    """`oldest_age` is in seconds since the channel's oldest group was opened; 0 if it has none."""
    return [
        {"name": name, **_shown(channel), "oldest_age": max(0.0, now - oldest.get(name, now))}
        for name, channel in stats.channels.items()
    ]


def _shown(stats: PoolStats | ChannelStats) -> dict[str, object]:
    return {field.name: getattr(stats, field.name) for field in fields(stats) if field.name not in HIDDEN}
