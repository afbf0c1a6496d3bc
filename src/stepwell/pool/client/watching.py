"""How a watcher reaches the shards: each is asked, and their answers are merged.

A shard that does not answer is named, and the answer comes without it: a watcher asks again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepwell.pool.api.preview import BatchPreview
from stepwell.pool.api.series import TimeSeries, merge_chunks
from stepwell.pool.api.watching import Changes, ChangesPage, Cursor, TrajectorySnapshot
from stepwell.pool.client.asking import AskingClient
from stepwell.pool.client.previewing import preview_batch
from stepwell.pool.slices.curation import AuditPage, Curate, Curation, CurationOutcome, ReadAudit
from stepwell.steps.columns import Columns, cut, pack, stack

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

WATCH_TIMEOUT = 10.0
"""Seconds that a question waits if no shard answers. A shard that was killed is back after about three."""


class WatchClient(AskingClient):
    """The part of PoolReader that is more than one merged answer."""

    async def series(self, *, seconds: float) -> TimeSeries:
        answer = await self.shards.ask_each(lambda _, shard: shard.series(seconds), timeout=WATCH_TIMEOUT)
        return merge_chunks(answer.parts, answer.missing)

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        """A shard that has left the pool is reset, and has nothing more."""
        names = await self.shards.names()
        known = {name: cursor for name, cursor in cursors.items() if name in names}
        shard_limit = max(1, limit // len(names))

        async def ask(name: str, shard: "ShardService") -> ChangesPage:
            return await shard.changes(cursors.get(name, Cursor()), shard_limit)

        answer = await self.shards.ask_each(ask, timeout=WATCH_TIMEOUT)
        pages = answer.by_shard
        return Changes(
            snapshots=[
                TrajectorySnapshot._make((*fields, name)) for name, page in pages.items() for fields in page.snapshots
            ],
            cursors=known | {name: page.cursor for name, page in pages.items()},
            reset_shards=[*(name for name, page in pages.items() if page.reset), *(cursors.keys() - known.keys())],
            more=any(page.more for page in pages.values()),
            missing=answer.missing,
        )

    async def preview(self, channel: str) -> BatchPreview:
        return await preview_batch(self.shards, channel)

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        plan = await self.shards.plan()
        by_shard: dict[str, list[tuple[str, str]]] = {}
        for uid in dict.fromkeys(uids):
            for name in plan.owners(uid[1]):
                by_shard.setdefault(name, []).append(uid)
        parts: dict[tuple[str, str], Columns] = {}

        async def read(name: str, own: list[tuple[str, str]]) -> None:
            read_parts = cut(*await self.shards.at(name, timeout=WATCH_TIMEOUT).read(own))
            parts.update({uid: part for uid, part in zip(own, read_parts, strict=True) if len(part.prompt_uids)})

        await asyncio.gather(*(read(name, own) for name, own in by_shard.items()))
        found = [parts[uid] for uid in uids if uid in parts]
        return stack(found) if found else pack([])

    async def curate(self, curation: Curation) -> CurationOutcome:
        return await self.ask(Curate(curation))

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> AuditPage:
        return await self.ask(ReadAudit(limit, trajectory_uid), timeout=WATCH_TIMEOUT)
