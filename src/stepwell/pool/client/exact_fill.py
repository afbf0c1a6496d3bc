"""A batch of exactly so many trajectories from all shards. Each shard offers groups, and the client chooses once. If
there is only one shard, it does both in one message.

- Nothing is waited for, except a shard that restarts while its part is taken.
- Parts that were taken in vain go back, and that counts as no attempt.
- Parts are taken shard by shard, in the same order by every client: of several clients that fill at once, one always
  succeeds.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby
from uuid import uuid4

from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.leasing import ExactFill, GroupOffer, LeasedGroups, merge_leased_groups
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.rules.exact_batch import choose_groups

OFFER_TIMEOUT = 2.0
"""Seconds. A shard that restarts is not waited for."""
MAX_TRIES = 8
"""How often the client chooses again because another client was faster."""


async def fill_exactly(shards: ShardSet, request: ExactFill) -> LeasedGroups | None:
    """None if there is no such batch now."""
    if request.trajectories < 1:
        raise BadRequest(f"a batch has at least one trajectory, not {request.trajectories}")
    names = await shards.names()
    if len(names) == 1:
        return await _fill_from_one(shards, request, names[0])
    for _ in range(MAX_TRIES):
        chosen = choose_groups(await _offers(shards, request), request.trajectories, request.shares)
        if chosen is None:
            return None
        leased = await _take(shards, request, chosen)
        if leased is not None:
            return leased
    return None


async def _fill_from_one(shards: ShardSet, request: ExactFill, name: str) -> LeasedGroups | None:
    lease_uid = uuid4().hex
    try:
        return await shards.at(name).fill(request, lease_uid)
    except BaseException:
        await _put_back(shards, [(name, lease_uid)])
        raise


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


async def _take(shards: ShardSet, request: ExactFill, chosen: Sequence[GroupOffer]) -> LeasedGroups | None:
    """All chosen groups, or nothing."""
    parts: list[LeasedGroups] = []
    leases: list[tuple[str, str]] = []
    is_complete = False
    try:
        for name, offers in groupby(sorted(chosen), key=lambda offer: offer.shard):
            lease_uid = uuid4().hex
            leases.append((name, lease_uid))
            part = await shards.at(name).take_offers(request, list(offers), lease_uid)
            if part is None:
                return None
            parts.append(part)
        is_complete = True
        return merge_leased_groups(parts)
    finally:
        if not is_complete:
            await _put_back(shards, leases)


async def _put_back(shards: ShardSet, leases: Sequence[tuple[str, str]]) -> None:
    calls = (shards.at(name).put_back(lease_uid) for name, lease_uid in leases)
    await asyncio.gather(*calls, return_exceptions=True)
