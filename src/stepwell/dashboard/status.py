"""The status of the pool, its channels, the gateways and the engines."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version

from stepwell.dashboard.queries import DashboardState
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import PolicyStatus, RewardTally
from stepwell.pool.api.stats import ChannelStats, PoolStats

DECISIONS_SHOWN = 20
HIDDEN = ("channels", "ready_by_source", "recent")
"""Statistics that are not shown with the others: channels stand apart, recent steps become notes."""


async def read_status(state: DashboardState, *, fresh: bool = False) -> dict[str, object]:
    """The status is some seconds old, unless `fresh` or the pool, or part of it, has just been found away."""
    stats, error = None, state.follower.error
    asking = asyncio.create_task(_read_policy(state, fresh=fresh))
    polling = asyncio.create_task(state.gateways.poll()) if fresh else None
    try:
        stats = await state.stats.get(fresh=fresh or error is not None)
    except PoolUnavailable as failure:
        error = str(failure)
    if polling is not None:
        await polling
    policy = await asking
    now = time.time()
    return {
        "now": now,
        "version": version("stepwell"),
        "pool": None if stats is None else _pool(state.plan, stats),
        "policy": None if policy is None else _policy(policy),
        "channels": [] if stats is None else _channels(stats, state.index.oldest_held(), now),
        "notes": [] if stats is None else _notes(stats),
        "gateways": [watched.now for watched in state.gateways.watched],
        "engines": state.gateways.engines(),
        "index": {"trajectories": len(state.index), "texts": len(state.texts), "behind": state.follower.behind},
        "pool_error": error,
    }


async def _read_policy(state: DashboardState, *, fresh: bool) -> PolicyStatus | None:
    """None if the first shard, which has it, does not answer."""
    try:
        return await state.policy.get(fresh=fresh)
    except PoolUnavailable:
        return None


def _pool(plan: PoolPlan, stats: PoolStats) -> dict[str, object]:
    created = {"name": plan.name, "journal": plan.journal_name, "archive": plan.archive}
    return {**created, **_shown(stats)}


def _policy(policy: PolicyStatus) -> dict[str, object]:
    """The policy by side: stable, and canary if there is one. The newest decision comes first."""
    canary = policy.canary
    sides = {"stable": policy.policy_version} | ({} if canary is None else {"canary": canary.version})
    return {
        "sides": [{"side": side, **_side(policy, side, version)} for side, version in sides.items()],
        "alarm": policy.alarm,
        "withdrawn": policy.withdrawn,
        "decisions": list(reversed(policy.decisions))[:DECISIONS_SHOWN],
    }


def _side(policy: PolicyStatus, side: str, version: int) -> dict[str, object]:
    tally, canary = policy.rewards.get(version, RewardTally()), policy.canary
    share = 0.0 if canary is None else canary.share
    since = canary.began_at if canary is not None and side == "canary" else None
    engines = canary.engines if canary is not None and side == "canary" else ()
    return {
        "version": version,
        "share": share if side == "canary" else 1.0 - share,
        "since": since,
        "engines": engines,
        "rewards": tally.count,
        "reward_mean": tally.mean,
    }


def _channels(stats: PoolStats, oldest: Mapping[str, float], now: float) -> list[dict[str, object]]:
    """`oldest_age` is in seconds since the channel's oldest group was opened; 0 if it has none."""
    return [
        {"name": name, **_shown(channel), "oldest_age": max(0.0, now - oldest.get(name, now))}
        for name, channel in stats.channels.items()
    ]


def _notes(stats: PoolStats) -> list[str]:
    """Advice, in words, on what an operator should change."""
    return [note for name, channel in stats.channels.items() if (note := channel.sampling_note(name)) is not None]


def _shown(stats: PoolStats | ChannelStats) -> dict[str, object]:
    return {field.name: getattr(stats, field.name) for field in fields(stats) if field.name not in HIDDEN}
