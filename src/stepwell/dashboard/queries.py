"""The dashboard's queries over the index, the texts and the pool.

Lists are answered from the index alone. The pool is called only when a person opens a trajectory.
"""

import asyncio
import time
from collections.abc import Sequence

from stepwell.dashboard.follower import by_trajectory, keys_with_text
from stepwell.dashboard.index import Search, SearchResult, TrajectoryKey, key_of
from stepwell.dashboard.views import GroupView, group_view, last_text, step_views
from stepwell.errors import BadRequest, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.staleness import Present
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState, why_not_trained
from stepwell.steps.columns import unpack

GROUP_TEXTS = 64
"""Rollouts of a group whose last response is read."""
AUDIT_ENTRIES = 200


class DashboardQueries:
    def __init__(self, state: DashboardState) -> None:
        self._state = state
        self._text_search = asyncio.Lock()
        """Text searches run one at a time, in a thread, so that they do not slow down other requests."""

    async def find(self, search: Search) -> SearchResult:
        if search.text is None:
            return self._state.index.find(search)
        if why := self._state.decoder.why_not():
            raise BadRequest(f"texts cannot be searched: {why}")
        async with self._text_search:
            found = await asyncio.to_thread(keys_with_text, self._state.texts.copy(), search.text)
        return self._state.index.find(search, found)

    async def trajectory(self, key: TrajectoryKey) -> dict[str, object]:
        """`held` says whether the pool still has its steps. `why` and `why_no_text` are empty where there is nothing
        to explain."""
        pool, decoder, summary = self._state.pool, self._state.decoder, self._state.index.get(key)
        if summary is None:
            raise UnknownTrajectory(f"no trajectory {key[0]!r} of prompt {key[1]!r} is known to the dashboard")
        columns, audit = await asyncio.gather(pool.read([key]), pool.audit(AUDIT_ENTRIES, key[0]))
        steps = unpack(columns, copy=False)
        return {
            "summary": summary,
            "why": await self._why(summary),
            "held": bool(steps),
            "metadata": steps[-1].metadata if steps else {},
            "steps": await asyncio.to_thread(step_views, steps, decoder),
            "audit": audit.entries,
            "why_no_text": decoder.why_not(),
        }

    async def group(self, prompt_uid: str, group: int | None, shard: str | None) -> GroupView:
        rows = self._state.index.group(prompt_uid, group, shard)
        if not rows:
            raise UnknownTrajectory(f"no such group of prompt {prompt_uid!r} is known to the dashboard")
        return group_view(rows, await self._last_texts(rows[:GROUP_TEXTS]))

    async def _why(self, summary: TrajectorySnapshot) -> str:
        try:
            version = (await self._state.stats.get()).policy_version
        except PoolUnavailable:
            version = summary.newest_version or 0
        return why_not_trained(summary, self._state.plan.limits, Present(version, time.time()))

    async def _last_texts(self, rows: Sequence[TrajectorySnapshot]) -> dict[TrajectoryKey, str]:
        if self._state.decoder.why_not():
            return {}
        columns = await self._state.pool.read([key_of(row) for row in rows if row.state is not TrajectoryState.DROPPED])

        def decode() -> dict[TrajectoryKey, str]:
            return {key: last_text(steps, self._state.decoder) for key, steps in by_trajectory(columns)}

        return await asyncio.to_thread(decode)
