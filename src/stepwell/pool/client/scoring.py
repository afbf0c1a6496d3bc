"""A reward worker's way to the shards.

What always holds: shards are served in turn; one that is away keeps no one from the others, and no judgement waits for
it, for the tickets it gave are gone with it. A ticket begins with the name of the shard that gave it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Literal
from uuid import uuid4

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.client.shards import PAUSE, ShardSet
from stepwell.steps.columns import Columns, unpack
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.pool")

PARK = 5.0
"""Seconds for which a shard is asked to tell of work; what is no longer listened for ends after that."""
GRACE = 2.0
"""Seconds by which its answer may be late."""


class ScoringClient:
    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._turn = 0

    async def take(self, count: int, lease: float, timeout: float) -> tuple[str, list[list[Step]]] | None:
        """A ticket and what is under it, from one shard; None if none had anything for `timeout`."""
        names = await self._shards.names()
        self._turn = (self._turn + 1) % len(names)
        taken = await self._take(names[self._turn], count, lease)
        return taken or await self._first(names[self._turn :] + names[: self._turn], count, lease, timeout)

    async def give(self, judgements: Sequence[Judgement]) -> list[bool]:
        by_shard: dict[str, list[int]] = {}
        for place, judgement in enumerate(judgements):
            by_shard.setdefault(await self._shards.owner(judgement.prompt_uid), []).append(place)
        counted = [False] * len(judgements)

        async def give(shard: str, places: list[int]) -> None:
            message = [judgements[place] for place in places]
            try:
                answers = await self._shards.ask(shard, "give_judgements", message, await_restart=False)
            except PoolUnavailable as failure:
                log.warning("%d judgements are lost, and will be made again: %s", len(places), failure)
                return
            for place, answer in zip(places, answers, strict=True):
                counted[place] = answer

        await asyncio.gather(*(give(shard, places) for shard, places in by_shard.items()))
        return counted

    async def _first(
        self, names: Sequence[str], count: int, lease: float, timeout: float
    ) -> tuple[str, list[list[Step]]] | None:
        """From the shard that is the first to have something."""
        deadline = time.monotonic() + timeout
        waits = {asyncio.ensure_future(self._wait(name, deadline)): name for name in names}
        outcomes: list[PoolUnavailable | None] = []
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    name, has_work = waits.pop(wait), wait.result()
                    if has_work is not True:
                        outcomes.append(has_work)
                    elif (taken := await self._take(name, count, lease)) is not None:
                        return taken
                    else:  # another worker was quicker
                        waits[asyncio.ensure_future(self._wait(name, deadline))] = name
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if all(outcomes) and outcomes[0] is not None:
            raise outcomes[0]
        return None

    async def _wait(self, name: str, deadline: float) -> Literal[True] | PoolUnavailable | None:
        """True as soon as that shard has something; at the deadline None, or why it was away."""
        while True:
            timeout = min(PARK, max(0.0, deadline - time.monotonic()))
            failure = None
            try:
                if await self._shards.ask(name, "wait_unscored", timeout, patience=timeout + GRACE):
                    return True
            except PoolUnavailable as away:
                failure = away
                await asyncio.sleep(PAUSE)
            if time.monotonic() >= deadline:
                return failure

    async def _take(self, name: str, count: int, lease: float) -> tuple[str, list[list[Step]]] | None:
        ticket = f"{name}/{uuid4().hex}"
        try:
            columns: Columns | None = await self._shards.ask(
                name, "take_unscored", count, lease, ticket, await_restart=False
            )
        except PoolUnavailable:
            return None
        if columns is None:
            return None
        steps = unpack(columns, copy=False)
        return ticket, [list(group) for _, group in groupby(steps, key=lambda step: step.trajectory_uid)]
