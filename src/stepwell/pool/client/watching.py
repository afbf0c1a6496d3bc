"""What watchers read from all shards: whether they can be used, changes, the steps of single trajectories, and what
would be trained next. For the last, each shard is asked as a fetch would ask it, and nothing is taken.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import (
    LATER,
    WAITING,
    BatchPreview,
    BatchRequest,
    ExactFill,
    GroupOffer,
    Order,
    PreviewItem,
    ShardPreview,
    UserLimit,
    max_per_user,
)
from stepwell.pool.api.watching import Changes, ChangesPage, Cursor, TrajectorySnapshot
from stepwell.pool.client.fetching import limited, oldest_parts
from stepwell.pool.client.shards import PartialAnswer, ShardSet
from stepwell.pool.rules.exact_batch import choose_groups
from stepwell.steps.columns import Columns, cut, pack, stack

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

NO_EXACT_SUM = "no exact batch is possible yet"
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


async def preview_batch(shards: ShardSet, channel: str) -> BatchPreview:
    share = (await shards.plan()).limits.max_share_per_user
    answer = await shards.ask_all(lambda shard: shard.preview(channel))
    last = max(answer.parts, key=attrgetter("asked_at"))
    several = len(answer.by_shard) + len(answer.missing) > 1
    if isinstance(last.request, ExactFill):
        request = last.request
        if several:
            answer = await shards.ask_all(lambda shard: shard.preview(channel, request))
        return _exact(answer, request, last.asked_at, share)
    waits_for = last.waits_for
    if several:
        answer, waits_for = await _by_parts(shards, last.request, share)
    is_complete = sum(part.count for part in answer.parts) >= last.request.count
    if answer.missing and last.request.order is Order.STRICT:
        is_complete, waits_for = False, f"an answer of {', '.join(answer.missing)}, which may hold what is older"
    return BatchPreview(
        request=last.request,
        asked_at=last.asked_at,
        items=sorted(_named(answer, "items"), key=lambda item: (item.from_history, item.opened_at)),
        is_complete=is_complete,
        waiting=_oldest_waiting(_named(answer, "waiting")),
        waits_for="" if is_complete else waits_for,
        missing=answer.missing,
    )


def exact_items(items: Sequence[PreviewItem], request: ExactFill, share: float | None) -> list[PreviewItem]:
    """The items of an exact batch; none if there is no such batch."""
    offers = {
        GroupOffer(i.shard, i.group, i.age, i.opened_at, len(i.trajectories), i.source, i.user if share else ""): i
        for i in items
    }
    chosen = choose_groups(list(offers), request.trajectories, request.shares, share)
    return [offers[offer] for offer in chosen or ()]


async def _by_parts(
    shards: ShardSet, request: BatchRequest, share: float | None
) -> tuple[PartialAnswer[ShardPreview], str]:
    """Each shard's part of the batch, and what a fetch would wait for."""
    limit = None if share is None else UserLimit(max_per_user(share, request.count))
    whole = replace(limited(request, limit), history=0.0)
    seen = await shards.ask_all(lambda shard: shard.preview(request.channel, whole))
    parts = oldest_parts({name: part.ready for name, part in seen.by_shard.items()}, request.count, limit)
    requests = {name: part.of(request) for name, part in parts.items()}
    nothing = replace(request, count=0)
    answer = await shards.ask_each(lambda name, shard: shard.preview(request.channel, requests.get(name, nothing)))
    return answer, "; ".join(f"{name}: {part.waits_for}" for name, part in seen.by_shard.items() if part.waits_for)


def _exact(
    answer: PartialAnswer[ShardPreview], request: ExactFill, asked_at: float, share: float | None
) -> BatchPreview:
    items = _named(answer, "items")
    chosen = exact_items(items, request, share)
    others = [replace(item, why=LATER if chosen else NO_EXACT_SUM) for item in items if item not in chosen]
    return BatchPreview(
        request=request,
        asked_at=asked_at,
        items=chosen,
        is_complete=bool(chosen),
        waiting=_oldest_waiting([*others, *_named(answer, "waiting")]),
        waits_for="" if chosen else f"groups with exactly {request.trajectories} trajectories together",
        missing=answer.missing,
    )


def _named(answer: PartialAnswer[ShardPreview], what: Literal["items", "waiting"]) -> list[PreviewItem]:
    """The shards' items, each with the name of its shard."""
    return [replace(item, shard=name) for name, part in answer.by_shard.items() for item in getattr(part, what)]


def _oldest_waiting(waiting: Sequence[PreviewItem]) -> list[PreviewItem]:
    return sorted(waiting, key=attrgetter("opened_at"))[:WAITING]
