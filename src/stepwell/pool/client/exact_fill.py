"""A batch of exactly so many trajectories from all shards: each says what it could give, the choice is made once. Where
there is one shard only, it does both at once.

What always holds: nothing is waited for but a shard that restarts while its part is taken. What was taken in vain goes
back as if it had never gone. Parts are taken shard by shard, in one order for all: of several who fill at once,
always one gets on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from uuid import uuid4

from stepwell.errors import BadRequest, PoolUnavailable
from stepwell.pool.api.leasing import GroupOffer, LeasedGroups, merge_leased_groups
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.rules.exact_batch import choose_groups
from stepwell.steps.step_filter import StepFilter

OFFER_PATIENCE = 2.0
"""Seconds a shard that is up may take to answer; one that is restarting is not waited for."""
TRIES = 8
"""How often a choice is made anew because someone else was quicker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFill:
    """What is asked for."""

    trajectories: int
    channel: str
    shares: Mapping[str, float]
    lease: float
    step_filter: StepFilter


async def fill(shards: ShardSet, wanted: ExactFill) -> LeasedGroups | None:
    """None if there is no such batch now."""
    if wanted.trajectories < 1:
        raise BadRequest(f"a batch has at least one trajectory, not {wanted.trajectories}")
    names = await shards.names()
    if len(names) == 1:
        return await _fill_alone(shards, wanted, names[0])
    for _ in range(TRIES):
        chosen = choose_groups(await _offers(shards, wanted), wanted.trajectories, wanted.shares)
        if chosen is None:
            return None
        filled = await _take(shards, wanted, chosen)
        if filled is not None:
            return filled
    return None


async def _fill_alone(shards: ShardSet, wanted: ExactFill, name: str) -> LeasedGroups | None:
    """The only shard offers, chooses and takes in one message."""
    lease_uid = uuid4().hex
    answered = False
    try:
        args = (wanted.channel, wanted.trajectories, wanted.shares, wanted.lease, lease_uid, wanted.step_filter)
        filled: LeasedGroups | None = await shards.ask(name, "fill", *args)
        answered = True
        return filled
    finally:
        if not answered:
            await asyncio.gather(_give_back(shards, name, lease_uid), return_exceptions=True)


async def _offers(shards: ShardSet, wanted: ExactFill) -> list[GroupOffer]:
    """Of all shards that answer; PoolUnavailable if none does."""
    failures: list[PoolUnavailable] = []

    async def ask(name: str) -> list[GroupOffer]:
        args = (wanted.channel, wanted.trajectories, wanted.step_filter)
        try:
            found: list[GroupOffer] = await shards.ask(
                name, "offers", *args, patience=OFFER_PATIENCE, await_restart=False
            )
        except PoolUnavailable as failure:
            failures.append(failure)
            return []
        return found

    names = await shards.names()
    offers = [offer for found in await asyncio.gather(*map(ask, names)) for offer in found]
    if len(failures) == len(names):
        raise failures[0]
    return offers


async def _take(shards: ShardSet, wanted: ExactFill, chosen: Sequence[GroupOffer]) -> LeasedGroups | None:
    """All that was chosen, or nothing."""
    parts: list[LeasedGroups] = []
    asked: list[tuple[str, str]] = []
    whole = False
    try:
        for name, offers in groupby(sorted(chosen), key=lambda offer: offer.shard):
            asked.append((name, uuid4().hex))
            args = (wanted.channel, list(offers), wanted.lease, asked[-1][1], wanted.step_filter)
            part: LeasedGroups | None = await shards.ask(name, "take_offers", *args)
            if part is None:
                return None
            parts.append(part)
        whole = True
        return merge_leased_groups(parts)
    finally:
        if not whole:
            await asyncio.gather(*(_give_back(shards, *lease) for lease in asked), return_exceptions=True)


async def _give_back(shards: ShardSet, name: str, lease_uid: str) -> None:
    await shards.ask(name, "put_back", lease_uid)
