"""How a watcher reaches the shards: each is asked, and their answers are merged.

A shard that does not answer is named, and the answer comes without it: a watcher asks again.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from stepwell.pool.api.curation import AuditPage, Curation, CurationOutcome
from stepwell.pool.api.series import TimeSeries, merge_chunks
from stepwell.pool.api.watching import Changes, ChangesPage, Cursor, TrajectorySnapshot
from stepwell.pool.client.shards import ShardClient
from stepwell.steps.columns import Columns, cut, pack, stack

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

WATCH_TIMEOUT = 10.0
"""Seconds that a question waits if no shard answers. A shard that was killed is back after about three."""


class WatchClient(ShardClient):
    """The part of PoolReader that is more than one merged answer."""

    async def series(self, *, seconds: float) -> TimeSeries:
        answer = await self.shards.ask_each(lambda _, shard: shard.series(seconds), timeout=WATCH_TIMEOUT)
        return merge_chunks(answer.parts, answer.missing)

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        shard_limit = max(1, limit // len(await self.shards.names()))

        async def ask(name: str, shard: "ShardService") -> ChangesPage:
            return await shard.changes(cursors.get(name, Cursor()), shard_limit)

        answer = await self.shards.ask_each(ask, timeout=WATCH_TIMEOUT)
        pages = answer.by_shard
        return Changes(
            snapshots=[
                TrajectorySnapshot._make((*fields, name)) for name, page in pages.items() for fields in page.snapshots
            ],
            cursors={**cursors, **{name: page.cursor for name, page in pages.items()}},
            reset_shards=[name for name, page in pages.items() if page.reset],
            more=any(page.more for page in pages.values()),
            missing=answer.missing,
        )

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        async def read(name: str, own: list[tuple[str, str]]) -> list[Columns]:
            return cut(*await self.shards.at(name, timeout=WATCH_TIMEOUT).read(own))

        parts = await self.shards.call_owners((prompt_uid for _, prompt_uid in uids), uids, read)
        return stack(parts) if parts else pack([])

    async def curate(self, curation: Curation) -> CurationOutcome:
        return await self.shards.at(await self.shards.owner(curation.prompt_uid)).curate(curation)

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> AuditPage:
        answer = await self.shards.ask_each(lambda _, shard: shard.audit(limit, trajectory_uid), timeout=WATCH_TIMEOUT)
        entries = [entry for part in answer.parts for entry in part]
        return AuditPage(sorted(entries, key=attrgetter("at"), reverse=True)[:limit], answer.missing)
