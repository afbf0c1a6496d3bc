"""How a reward worker reaches the shards.

- Shards are served in turn. A shard that is away does not keep a worker from the others.
- Judgements do not wait for a shard that is away, because the reward leases it gave are lost with it.
- Heartbeats are sent for the leases of this worker: what it has is offered to others soon after its death.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, groupby

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import new_reward_lease
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.api.transport import UNSCORED, UNSEEN, Revision
from stepwell.pool.client.held_leases import HeldLeases
from stepwell.pool.client.shards import RETRY_PAUSE, ShardSet
from stepwell.pool.slices.producing import GiveJudgements, TakeUnscored
from stepwell.steps.columns import unpack
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.pool")


class ScoringTurns:
    def __init__(self, shards: ShardSet, held: HeldLeases) -> None:
        self._shards = shards
        self._held = held
        self._turn = 0
        self._empty: dict[str, Revision] = {}
        """By shard: the last news of work after which there was none."""

    async def take(
        self, count: int, lease: float, timeout: float, by_step: bool
    ) -> tuple[str, list[list[Step]]] | None:
        names = await self._shards.names()
        self._turn = (self._turn + 1) % len(names)
        with suppress(PoolUnavailable):
            if (taken := await self._take(names[self._turn], count, lease, by_step)) is not None:
                return taken
        return await self._take_first(names[self._turn :] + names[: self._turn], count, lease, timeout, by_step)

    async def give(self, judgements: Sequence[Judgement]) -> list[bool]:
        async def give_own(name: str, own: list[int]) -> list[tuple[int, bool]]:
            given = GiveJudgements([judgements[index] for index in own])
            try:
                counted = await self._shards.run(name, given, await_restart=False)
            except PoolUnavailable as failure:
                log.warning("%d judgements are lost and will be made again: %s", len(own), failure)
                counted = [False] * len(own)
            return list(zip(own, counted, strict=True))

        by_shard: dict[str, list[int]] = {}
        for index, judgement in enumerate(judgements):
            by_shard.setdefault(judgement.lease_uid.rpartition("/")[0], []).append(index)
        answers = await asyncio.gather(*(give_own(name, own) for name, own in by_shard.items()))
        return [counted for _, counted in sorted(chain.from_iterable(answers))]

    async def _take_first(
        self, names: Sequence[str], count: int, lease: float, timeout: float, by_step: bool
    ) -> tuple[str, list[list[Step]]] | None:
        """From the first shard that has work. None also if there are other shards by now."""
        deadline = time.monotonic() + timeout
        waits = {asyncio.create_task(self._wait(name, deadline)): name for name in names}
        plan_changed = asyncio.create_task(self._shards.next_plan(None))
        outcomes: list[PoolUnavailable | None] = []
        try:
            while waits and not plan_changed.done():
                done, _ = await asyncio.wait({*waits, plan_changed}, return_when=asyncio.FIRST_COMPLETED)
                for wait in done - {plan_changed}:
                    name, outcome = waits.pop(wait), wait.result()
                    if not isinstance(outcome, Revision):
                        outcomes.append(outcome)
                        continue
                    with suppress(PoolUnavailable):
                        if (taken := await self._take(name, count, lease, by_step)) is not None:
                            return taken
                        self._empty[name] = outcome  # another worker was faster
                    waits[asyncio.create_task(self._wait(name, deadline))] = name
        finally:
            calls = (plan_changed, *waits)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if outcomes and all(outcomes) and not waits:
            raise next(filter(None, outcomes))
        return None

    async def _wait(self, name: str, deadline: float) -> Revision | PoolUnavailable | None:
        """The news that this shard may have work. At the deadline None, or the failure if the shard was away."""
        while True:
            failure = None
            try:
                seen = {UNSCORED: self._empty.get(name, UNSEEN)}
                news = await self._shards.wait_news(name, seen, max(0.0, deadline - time.monotonic()))
                if UNSCORED in news:
                    return news[UNSCORED].revision
            except PoolUnavailable as away:
                failure = away
                await asyncio.sleep(RETRY_PAUSE)
            if time.monotonic() >= deadline:
                return failure

    async def _take(self, name: str, count: int, lease: float, by_step: bool) -> tuple[str, list[list[Step]]] | None:
        lease_uid = new_reward_lease(name)
        take = TakeUnscored(count, lease, lease_uid, by_step)
        columns = await self._shards.run(name, take, await_restart=False)
        if columns is None:
            return None
        with self._held.holding((name, lease_uid)):
            asyncio.get_running_loop().call_later(lease, self._held.release, [(name, lease_uid)])
        steps = unpack(columns, copy=False)
        return lease_uid, [list(group) for _, group in groupby(steps, key=lambda step: step.trajectory_uid)]
