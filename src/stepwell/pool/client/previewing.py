"""What would be trained next, from all shards: each is asked as a fetch would ask it, and nothing is taken."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Literal

from stepwell.pool.api.leasing import BatchRequest, ExactFill, GroupOffer, Order
from stepwell.pool.api.preview import LATER, WAITING, BatchPreview, PreviewItem, ShardPreview
from stepwell.pool.api.user_share import UserLimit, max_per_user
from stepwell.pool.client.fetching import limited, oldest_parts
from stepwell.pool.client.shards import PartialAnswer, ShardSet
from stepwell.pool.rules.exact_batch import choose_groups

NO_EXACT_SUM = "no exact batch is possible yet"


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
