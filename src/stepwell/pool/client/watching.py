"""A watcher's way to the shards: each is asked, and what they tell is put together.

What always holds: looking waits for no shard longer than some seconds, for whoever watches will look again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from operator import attrgetter

from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.series import TimeSeries, merge_chunks
from stepwell.pool.api.watching import Changes, ChangesPage, Cursor, TrajectorySnapshot
from stepwell.pool.client.shards import ShardSet
from stepwell.steps.columns import Columns, cut, pack, stack

WATCH_PATIENCE = 10.0
"""Seconds; a shard that was killed is back after some three."""


class WatchClient:
    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards

    async def series(self, seconds: float) -> TimeSeries:
        return merge_chunks(await self._shards.ask_all("series", seconds, patience=WATCH_PATIENCE))

    async def changes(self, cursors: Mapping[str, Cursor], limit: int) -> Changes:
        names = await self._shards.names()
        share = max(1, limit // len(names))

        async def ask(name: str) -> ChangesPage:
            args = (cursors.get(name, Cursor()), share)
            page: ChangesPage = await self._shards.ask(name, "changes", *args, patience=WATCH_PATIENCE)
            return page

        pages = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
        return Changes(
            snapshots=[TrajectorySnapshot._make((*fields, name)) for name in names for fields in pages[name].snapshots],
            cursors={name: page.cursor for name, page in pages.items()},
            reset_shards=[name for name, page in pages.items() if page.reset],
            more=any(page.more for page in pages.values()),
        )

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        by_shard: dict[str, list[int]] = {}
        for place, (_, prompt_uid) in enumerate(uids):
            by_shard.setdefault(await self._shards.owner(prompt_uid), []).append(place)

        async def read(shard: str, places: list[int]) -> dict[int, Columns]:
            wanted = [uids[place] for place in places]
            columns, sizes = await self._shards.ask(shard, "read", wanted, patience=WATCH_PATIENCE)
            return dict(zip(places, cut(columns, sizes), strict=True))

        answers = await asyncio.gather(*(read(shard, places) for shard, places in by_shard.items()))
        parts = {place: part for answer in answers for place, part in answer.items()}
        return stack([parts[place] for place in sorted(parts)]) if parts else pack([])

    async def curate(self, curation: Curation) -> CurationOutcome:
        shard = await self._shards.owner(curation.prompt_uid)
        outcome: CurationOutcome = await self._shards.ask(shard, "curate", curation)
        return outcome

    async def audit(self, limit: int, trajectory_uid: str | None) -> list[AuditEntry]:
        answers = await self._shards.ask_all("audit", limit, trajectory_uid, patience=WATCH_PATIENCE)
        entries = [entry for answer in answers for entry in answer]
        return sorted(entries, key=attrgetter("at"), reverse=True)[:limit]
