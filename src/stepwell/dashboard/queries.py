"""The state that all requests to the dashboard share, and the queries over it: the pool, the answers that it gave, and
the index and the texts that follow it.

Lists are answered from the index alone. The pool is called only when a person opens a trajectory.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from importlib.metadata import version

from stepwell.common.async_calls import SharedAnswer, repeating
from stepwell.common.tokenizers import TokenDecoder, Tokenizer
from stepwell.dashboard.follower import ConversationTexts, PoolFollower, TextIndexer, by_trajectory, keys_with_text
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.index import Search, SearchResult, TrajectoryIndex, TrajectoryKey, key_of
from stepwell.dashboard.views import GroupView, NextBatches, group_view, last_text, step_views
from stepwell.errors import BadRequest, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import PolicyStatus, RewardTally
from stepwell.pool.api.staleness import Present
from stepwell.pool.api.stats import ChannelStats, PoolStats, TimeSeries
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState, why_not_trained
from stepwell.pool.client import PoolClient
from stepwell.steps.columns import unpack

MAX_SERIES_SECONDS = 24 * 3600.0
SERIES_SPANS = (60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, MAX_SERIES_SECONDS)
GROUP_TEXTS = 64
"""Rollouts of a group whose last response is read."""
AUDIT_ENTRIES = 200
DECISIONS_SHOWN = 20
HIDDEN = ("channels", "ready_by_source", "recent")
"""Statistics that are not shown with the others: channels stand apart, recent steps become notes."""


class DashboardState:
    def __init__(self, pool: PoolClient, plan: PoolPlan, gateways: GatewayMonitor, tokenizer: Tokenizer | None) -> None:
        self.pool = pool
        self.plan = plan
        self.gateways = gateways
        self.decoder = TokenDecoder(tokenizer)
        self.index = TrajectoryIndex()
        self.texts = ConversationTexts()
        self.follower = PoolFollower(pool, self.index, self.texts)
        self.stats = SharedAnswer(pool.stats)
        self.policy = SharedAnswer(pool.policy_status)
        self.next_batches = NextBatches(pool, self.decoder)
        self._series = {span: SharedAnswer(partial(pool.series, seconds=span)) for span in SERIES_SPANS}
        self._text_search = asyncio.Lock()
        """Text searches run one at a time, in a thread, so that they do not slow down other requests."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Inside the block, the index and the readings of the gateways are kept up to date."""
        self.decoder.start()
        indexer = TextIndexer(self.pool, self.texts, self.decoder)
        try:
            async with self.gateways.watching(), repeating(self.follower.poll, indexer.poll):
                yield
        finally:
            await self.stats.close()
            await self.policy.close()
            await self.next_batches.close()
            for shared in self._series.values():
                await shared.close()

    async def series(self, seconds: float) -> TimeSeries:
        """Callers share the answer for the shortest span that is long enough."""
        return await self._series[min(span for span in SERIES_SPANS if span >= seconds)].get()

    async def find(self, search: Search) -> SearchResult:
        if search.text is None:
            return self.index.find(search)
        if why := self.decoder.why_not():
            raise BadRequest(f"texts cannot be searched: {why}")
        async with self._text_search:
            found = await asyncio.to_thread(keys_with_text, self.texts.copy(), search.text)
        return self.index.find(search, found)

    async def trajectory(self, key: TrajectoryKey) -> dict[str, object]:
        """`held` says whether the pool still has its steps. `why` and `why_no_text` are empty where there is nothing
        to explain."""
        summary = self.index.get(key)
        if summary is None:
            raise UnknownTrajectory(f"no trajectory {key[0]!r} of prompt {key[1]!r} is known to the dashboard")
        columns, audit = await asyncio.gather(self.pool.read([key]), self.pool.audit(AUDIT_ENTRIES, key[0]))
        steps = unpack(columns, copy=False)
        return {
            "summary": summary,
            "why": await self._why_not_trained(summary),
            "held": bool(steps),
            "metadata": steps[-1].metadata if steps else {},
            "steps": await asyncio.to_thread(step_views, steps, self.decoder),
            "audit": audit.entries,
            "why_no_text": self.decoder.why_not(),
        }

    async def group(self, prompt_uid: str, group: int | None, shard: str | None) -> GroupView:
        rows = self.index.group(prompt_uid, group, shard)
        if not rows:
            raise UnknownTrajectory(f"no such group of prompt {prompt_uid!r} is known to the dashboard")
        return group_view(rows, await self._last_texts(rows[:GROUP_TEXTS]))

    async def _why_not_trained(self, summary: TrajectorySnapshot) -> str:
        try:
            version = (await self.stats.get()).policy_version
        except PoolUnavailable:
            version = summary.newest_version or 0
        return why_not_trained(summary, self.plan.limits, Present(version, time.time()))

    async def _last_texts(self, rows: Sequence[TrajectorySnapshot]) -> dict[TrajectoryKey, str]:
        if self.decoder.why_not():
            return {}
        columns = await self.pool.read([key_of(row) for row in rows if row.state is not TrajectoryState.DROPPED])

        def decode() -> dict[TrajectoryKey, str]:
            return {key: last_text(steps, self.decoder) for key, steps in by_trajectory(columns)}

        return await asyncio.to_thread(decode)


# -- the status of the pool, its channels, the gateways and the engines ------------------------------------------------


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
    return {
        "policy": await asking,
        "now": time.time(),
        "version": version("stepwell"),
        **_pool_status(state, stats),
        "gateways": [watched.now for watched in state.gateways.watched],
        "engines": state.gateways.engines(),
        "index": {"trajectories": len(state.index), "texts": len(state.texts), "behind": state.follower.behind},
        "pool_error": error,
    }


async def _read_policy(state: DashboardState, *, fresh: bool) -> dict[str, object] | None:
    """None if the first shard, which has it, does not answer."""
    try:
        return _policy(await state.policy.get(fresh=fresh))
    except PoolUnavailable:
        return None


def _pool_status(state: DashboardState, stats: PoolStats | None) -> dict[str, object]:
    """The pool; its channels, each with the seconds since its oldest group was opened, 0 if it has none; and advice, in
    words, on what an operator should change."""
    if stats is None:
        return {"pool": None, "channels": [], "notes": []}
    plan, oldest, now = state.plan, state.index.oldest_held(), time.time()
    return {
        "pool": {"name": plan.name, "journal": plan.journal_name, "archive": plan.archive, **_shown(stats)},
        "channels": [
            {"name": name, **_shown(channel), "oldest_age": max(0.0, now - oldest.get(name, now))}
            for name, channel in stats.channels.items()
        ],
        "notes": [note for name, channel in stats.channels.items() if (note := channel.sampling_note(name))],
    }


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
    is_canary = canary is not None and side == "canary"
    share = 0.0 if canary is None else canary.share
    return {
        "version": version,
        "share": share if is_canary else 1.0 - share,
        "since": canary.began_at if canary is not None and is_canary else None,
        "engines": canary.engines if canary is not None and is_canary else (),
        "rewards": tally.count,
        "reward_mean": tally.mean,
    }


def _shown(stats: PoolStats | ChannelStats) -> dict[str, object]:
    return {field.name: getattr(stats, field.name) for field in fields(stats) if field.name not in HIDDEN}
