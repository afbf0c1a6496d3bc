"""How a watcher reaches the shards: each is asked, and their answers are merged.

Reading waits for a shard no longer than some seconds, because a watcher asks again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from operator import attrgetter

from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.series import TimeSeries, merge_chunks
from stepwell.pool.api.watching import Changes, ChangesPage, Cursor, TrajectorySnapshot
from stepwell.pool.client.shards import ShardClient
from stepwell.steps.columns import Columns, cut, pack, stack

WATCH_TIMEOUT = 10.0
"""Seconds. A shard that was killed is back after about three."""


class WatchClient(ShardClient):
    """The part of PoolReader that is more than one merged answer."""

    async def series(self, *, seconds: float) -> TimeSeries:
        return merge_chunks(await self.shards.call_all(lambda shard: shard.series(seconds), timeout=WATCH_TIMEOUT))

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        names = await self.shards.names()
        shard_limit = max(1, limit // len(names))

        async def ask(name: str) -> ChangesPage:
            shard = self.shards.at(name, timeout=WATCH_TIMEOUT)
            return await shard.changes(cursors.get(name, Cursor()), shard_limit)

        pages = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
        return Changes(
            snapshots=[TrajectorySnapshot._make((*fields, name)) for name in names for fields in pages[name].snapshots],
            cursors={name: page.cursor for name, page in pages.items()},
            reset_shards=[name for name, page in pages.items() if page.reset],
            more=any(page.more for page in pages.values()),
        )

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        async def read(name: str, own: list[tuple[str, str]]) -> list[Columns]:
            return cut(*await self.shards.at(name, timeout=WATCH_TIMEOUT).read(own))

        parts = await self.shards.call_owners((prompt_uid for _, prompt_uid in uids), uids, read)
        return stack(parts) if parts else pack([])

    async def curate(self, curation: Curation) -> CurationOutcome:
        return await self.shards.at(await self.shards.owner(curation.prompt_uid)).curate(curation)

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        answers = await self.shards.call_all(lambda shard: shard.audit(limit, trajectory_uid), timeout=WATCH_TIMEOUT)
        entries = [entry for answer in answers for entry in answer]
        return sorted(entries, key=attrgetter("at"), reverse=True)[:limit]
