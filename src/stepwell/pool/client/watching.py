"""What watchers read from all shards: whether they can be used, changes, and the steps of single trajectories."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.watching import Changes, ChangesPage, Cursor, TrajectorySnapshot
from stepwell.pool.client.shards import ShardSet
from stepwell.steps.columns import Columns, cut, pack, stack

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

CHECK_TIMEOUT = 1.0
WATCH_TIMEOUT = 10.0
"""Seconds that a watcher's question waits if no shard answers. A shard that was killed is back after about three."""


async def require_usable(shards: ShardSet) -> None:
    """PoolUnavailable, with the reason, if a shard does not answer at once or takes no data."""
    await shards.plan(timeout=CHECK_TIMEOUT)
    names = await shards.names()
    stats = await asyncio.gather(*(shards.at(name, timeout=CHECK_TIMEOUT).stats() for name in names))
    short = [name for name, part in zip(names, stats, strict=True) if part.short_of_disk]
    if short:
        raise PoolUnavailable(
            f"{', '.join(short)}: no new data is taken, because the disk of the journal is nearly full. Free some "
            "space there, or let trainers take what the pool holds; steps wait in the gateways meanwhile"
        )


async def read_changes(shards: ShardSet, cursors: Mapping[str, Cursor], limit: int) -> Changes:
    """See PoolClient.changes."""
    names = await shards.names()
    known = {name: cursor for name, cursor in cursors.items() if name in names}
    shard_limit = max(1, limit // len(names))

    async def ask(name: str, shard: "ShardService") -> ChangesPage:
        return await shard.changes(cursors.get(name, Cursor()), shard_limit)

    answer = await shards.ask_each(ask, timeout=WATCH_TIMEOUT)
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


async def read_steps(shards: ShardSet, uids: Sequence[tuple[str, str]]) -> Columns:
    """See PoolClient.read."""
    plan = await shards.plan()
    by_shard: dict[str, list[tuple[str, str]]] = {}
    for uid in dict.fromkeys(uids):
        for name in plan.owners(uid[1]):
            by_shard.setdefault(name, []).append(uid)
    parts: dict[tuple[str, str], Columns] = {}

    async def read(name: str, own: list[tuple[str, str]]) -> None:
        read_parts = cut(*await shards.at(name, timeout=WATCH_TIMEOUT).read(own))
        parts.update({uid: part for uid, part in zip(own, read_parts, strict=True) if len(part.prompt_uids)})

    await asyncio.gather(*(read(name, own) for name, own in by_shard.items()))
    found = [parts[uid] for uid in uids if uid in parts]
    return stack(found) if found else pack([])
