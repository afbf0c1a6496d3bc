"""A batch of exactly so many trajectories from all shards. Each shard offers groups, and the client chooses once. If
there is only one shard, it does both in one message.

- Nothing is waited for. If a shard ends or stops while its part is taken, the others may have enough; otherwise there
  is a batch again when it is back.
- Parts that were taken in vain go back, and that counts as no attempt.
- Parts are taken shard by shard, in the same order by every client: of several clients that fill at once, one always
  succeeds.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby

from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.leasing import (
    ExactFill,
    GroupOffer,
    LeasedGroups,
    merge_leased_groups,
    new_batch_uid,
    part_lease_uid,
)
from stepwell.pool.client.held_leases import HeldLeases
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.rules.exact_batch import choose_groups

OFFER_TIMEOUT = 2.0
"""Seconds. A shard that restarts is not waited for."""
MAX_TRIES = 8
"""How often the client chooses again because another client was faster."""


async def fill_exactly(
    shards: ShardSet, held: HeldLeases, request: ExactFill, *, heartbeats: bool
) -> LeasedGroups | None:
    """None if there is no such batch now. With `heartbeats`, the leases end soon after this process."""
    if request.trajectories < 1:
        raise BadRequest(f"a batch has at least one trajectory, not {request.trajectories}")
    names = await shards.names()
    if len(names) == 1:
        return await _fill_from_one(shards, held, request, (names[0], new_batch_uid(heartbeats=heartbeats)))
    for _ in range(MAX_TRIES):
        max_share_per_user = (await shards.plan()).limits.max_share_per_user
        offers = await _offers(shards, request)
        chosen = choose_groups(offers, request.trajectories, request.shares, max_share_per_user)
        if chosen is None:
            return None
        batch_uid = new_batch_uid(heartbeats=heartbeats, coordinator=min(chosen).shard)
        leased = await _take(shards, held, request, chosen, batch_uid)
        if leased is not None:
            return leased
    return None


async def _fill_from_one(
    shards: ShardSet, held: HeldLeases, request: ExactFill, lease: tuple[str, str]
) -> LeasedGroups | None:
    with held.holding(lease):
        leased = await shards.at(lease[0]).fill(request, lease[1])
    if leased is None:
        held.release([lease])
    return leased


async def _offers(shards: ShardSet, request: ExactFill) -> list[GroupOffer]:
    """The offers of all shards that answer. PoolUnavailable if none does."""
    failures: list[PoolUnavailable] = []

    async def ask(name: str) -> list[GroupOffer]:
        shard = shards.at(name, timeout=OFFER_TIMEOUT, await_restart=False)
        try:
            return await shard.offers(request)
        except PoolUnavailable as failure:
            failures.append(failure)
            return []

    names = await shards.names()
    offers = [offer for offered in await asyncio.gather(*map(ask, names)) for offer in offered]
    if len(failures) == len(names):
        raise failures[0]
    return offers


async def _take(
    shards: ShardSet, held: HeldLeases, request: ExactFill, chosen: Sequence[GroupOffer], batch_uid: str
) -> LeasedGroups | None:
    """All chosen groups, or nothing."""
    by_shard = [(name, list(offers)) for name, offers in groupby(sorted(chosen), key=lambda offer: offer.shard)]
    leases = [(name, part_lease_uid(batch_uid, number)) for number, (name, _) in enumerate(by_shard)]
    parts: list[LeasedGroups] = []
    with held.holding(*leases):
        for (name, lease_uid), (_, offers) in zip(leases, by_shard, strict=True):
            take = shards.at(name, await_restart=False).take_offers(request, offers, lease_uid)
            try:
                part = await shards.while_it_answers(name, take)
            except PoolUnavailable:  # others may have enough
                held.put_back(leases)
                return None
            if part is None:
                held.put_back(leases[: len(parts)])
                held.release(leases)
                return None
            parts.append(part)
    return merge_leased_groups(parts)
