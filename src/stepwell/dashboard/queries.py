"""The dashboard's queries over the index, the texts and the pool.

Lists are answered from the index alone. The pool is called only when a person opens or curates a trajectory.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepwell.common.coalescing import SharedAnswer
from stepwell.common.tokenizers import TokenDecoder
from stepwell.dashboard.index.follower import PoolFollower, by_trajectory
from stepwell.dashboard.index.search import Search
from stepwell.dashboard.index.texts import ConversationTexts, keys_with_text
from stepwell.dashboard.index.trajectories import SearchResult, TrajectoryIndex, TrajectoryKey, key_of
from stepwell.dashboard.views import GroupView, group_view, last_text, step_views
from stepwell.errors import BadRequest, PoolUnavailable, UnknownTrajectory
from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.explanations import why_not_trained
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.ports import PoolReader
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.steps.columns import unpack
from stepwell.steps.step import JsonObject, Step

GROUP_TEXTS = 64
"""Rollouts of a group whose last response is read."""
AUDIT_ENTRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    summary: TrajectorySnapshot
    why: str
    """Why it is not trained; empty if it is."""
    held: bool
    """Whether the pool still has its steps."""
    metadata: JsonObject
    steps: Sequence[Mapping[str, object]]
    """See dashboard/views.py, StepView."""
    audit: Sequence[AuditEntry]
    why_no_text: str
    """Why there are only ids; empty if there are texts."""


class DashboardQueries:
    def __init__(
        self,
        pool: PoolReader,
        limits: Limits,
        stats: SharedAnswer[PoolStats],
        index: TrajectoryIndex,
        texts: ConversationTexts,
        follower: PoolFollower,
        decoder: TokenDecoder,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._stats = stats
        self._index = index
        self._texts = texts
        self._follower = follower
        self._decoder = decoder
        self._text_search = asyncio.Lock()
        """Text searches run one at a time, in a thread, so that they do not slow down other requests."""

    async def find(self, search: Search, text: str | None) -> SearchResult:
        if text is None:
            return self._index.find(search)
        if why := self._decoder.why_not():
            raise BadRequest(f"texts cannot be searched: {why}")
        async with self._text_search:
            found = await asyncio.to_thread(keys_with_text, self._texts.copy(), text)
        return self._index.find(search, found)

    async def trajectory(self, key: TrajectoryKey) -> TrajectoryView:
        summary = self._index.get(key)
        if summary is None:
            raise UnknownTrajectory(f"no trajectory {key[0]!r} of prompt {key[1]!r} is known to the dashboard")
        columns, audit = await asyncio.gather(self._pool.read([key]), self._pool.audit(AUDIT_ENTRIES, key[0]))
        steps = unpack(columns, copy=False)
        return TrajectoryView(
            summary=summary,
            why=await self._why(summary),
            held=bool(steps),
            metadata=steps[-1].metadata if steps else {},
            steps=await asyncio.to_thread(_shown, steps, self._decoder),
            audit=audit,
            why_no_text=self._decoder.why_not(),
        )

    async def group(self, prompt_uid: str, group: int | None, shard: str | None) -> GroupView:
        rows = self._index.group(prompt_uid, group, shard)
        if not rows:
            raise UnknownTrajectory(f"no such group of prompt {prompt_uid!r} is known to the dashboard")
        return group_view(rows, await self._last_texts(rows[:GROUP_TEXTS]))

    async def curate(self, curations: Sequence[Curation]) -> Mapping[str, CurationOutcome]:
        """One after the other, so that a long list does not block the pool. The index is updated before the return."""
        try:
            return {wanted.trajectory_uid: await self._pool.curate(wanted) for wanted in curations}
        finally:
            await self._follower.poll()

    async def _why(self, summary: TrajectorySnapshot) -> str:
        try:
            version = (await self._stats.get()).policy_version
        except PoolUnavailable:
            version = summary.newest_version or 0
        return why_not_trained(summary, self._limits, version)

    async def _last_texts(self, rows: Sequence[TrajectorySnapshot]) -> dict[TrajectoryKey, str]:
        if self._decoder.why_not():
            return {}
        columns = await self._pool.read([key_of(row) for row in rows if row.state is not TrajectoryState.DROPPED])

        def decode() -> dict[TrajectoryKey, str]:
            return {key: last_text(steps, self._decoder) for key, steps in by_trajectory(columns)}

        return await asyncio.to_thread(decode)


def _shown(steps: Sequence[Step], decoder: TokenDecoder) -> list[dict[str, object]]:
    return [view.as_json() for view in step_views(steps, decoder)]
