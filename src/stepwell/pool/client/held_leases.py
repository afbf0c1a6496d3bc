"""The leases that this client holds, also as a reward worker: it sends heartbeats for them, and ends them.

- One message to each shard every few seconds names all leases that the client holds there. A lease that is no longer
  named returns by itself, so a part that was taken in vain needs no more than to be released.
- The parts of a batch are acknowledged together. First every shard confirms that it still has its part. Then the
  batch's coordinator, one of these shards, writes the decision down. From then on the batch is acknowledged, whoever
  dies: a shard that was not told yet asks the coordinator. When all are told, so is the coordinator, which need not
  keep the decision any more.
- A reward worker is served by the shards in turn, so that one that is away does not keep it from the others. Its
  judgements do not wait for a shard that is away, because the reward leases it gave are lost with it.
- All calls may be repeated.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from typing import Any

from stepwell.errors import LeaseExpired, PoolUnavailable
from stepwell.pool.api.leasing import Settlement, batch_of_lease, decision_of, is_live, new_reward_lease
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.api.transport import UNSCORED, UNSEEN, Revision
from stepwell.pool.client.shards import RETRY_PAUSE, ShardSet
from stepwell.pool.slices.producing import GiveJudgements, TakeUnscored
from stepwell.steps.columns import unpack
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.pool")

HEARTBEAT_INTERVAL = 2.5
"""Seconds. A shard ends a lease after ten seconds without a heartbeat."""
HEARTBEAT_ANSWER = 1.0
"""Seconds that the answer to a heartbeat is waited for. The next heartbeat does not depend on it."""

PartLease = tuple[str, str]
"""A shard and the name of a lease there."""


class HeldLeases:
    def __init__(self, shards: ShardSet, *, interval: float = HEARTBEAT_INTERVAL) -> None:
        self._shards = shards
        self._interval = interval
        self._held: dict[PartLease, None] = {}
        self._beating: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Calls that nobody waits for."""

    @contextmanager
    def holding(self, *leases: PartLease) -> Iterator[None]:
        """Around the calls that take these leases. Heartbeats are sent from here on, also after the block, unless it
        fails: then the leases are put back. A lease that is not to follow this process gets no heartbeats."""
        self._held |= dict.fromkeys(lease for lease in leases if is_live(lease[1]))
        if self._held and (self._beating is None or self._beating.done()):
            self._beating = asyncio.create_task(self._beat())
        try:
            yield
        except BaseException:
            self.put_back(leases)
            raise

    def release(self, leases: Iterable[PartLease]) -> None:
        for lease in leases:
            self._held.pop(lease, None)

    def put_back(self, leases: Sequence[PartLease]) -> list[asyncio.Task[None]]:
        """Nobody has seen the data: it returns, and this counts as no attempt. The calls need not be waited for."""
        self.release(leases)
        return [self._start(self._put_back(shard, uid)) for shard, uid in leases]

    async def ack(self, leases: Sequence[PartLease]) -> None:
        """LeaseExpired if a part of a batch is no longer held: then none of its parts is acknowledged. PoolUnavailable
        if a shard did not answer: then the call can be repeated."""
        await self._require_shards(leases)
        batches = _by_batch(leases)
        several = [parts for parts in batches if len(parts) > 1]
        single = _by_shard(parts[0] for parts in batches if len(parts) == 1)
        outcomes = await asyncio.gather(
            *(self._ack_single(shard, uids) for shard, uids in single.items()),
            *map(self._ack_batch, several),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if Settlement.EXPIRED in outcomes:
            raise LeaseExpired(
                "the lease was over before the batch was acknowledged: this process was silent for too long, or it "
                "must ask for a longer one"
            )

    async def nack(self, leases: Sequence[PartLease]) -> None:
        self.release(leases)
        await self._require_shards(leases)
        await asyncio.gather(*(self._shards.at(shard).nack(uid) for shard, uid in leases))

    async def _require_shards(self, leases: Sequence[PartLease]) -> None:
        """A trainer that speaks HTTP names its leases itself, and could name any actor of the cluster."""
        coordinators = {decision[0] for _, uid in leases if (decision := decision_of(uid)) is not None}
        foreign = ({shard for shard, _ in leases} | coordinators) - set(await self._shards.names())
        if foreign:
            raise LeaseExpired(f"there is no such lease: {min(foreign)[:80]!r} is no shard of this pool")

    async def _ack_single(self, shard: str, uids: Sequence[str]) -> Settlement:
        """Batches of this shard alone, in one call. EXPIRED if one of them is."""
        settlements = await self._shards.at(shard).ack_several(uids)
        self.release((shard, uid) for uid in uids)
        return Settlement.EXPIRED if Settlement.EXPIRED in settlements else Settlement.DONE

    async def _ack_batch(self, parts: Sequence[PartLease]) -> Settlement:
        coordinator, decision = decision_of(parts[0][1]) or ("", "")
        names = [decision] if decision else []
        answers = await asyncio.gather(*(self._shards.at(shard).renew([uid, *names]) for shard, uid in parts))
        states = [answer[0] for answer in answers]
        is_expired = Settlement.EXPIRED in states
        if decision and not is_expired:
            is_expired = await self._shards.at(coordinator).ack(decision) is Settlement.EXPIRED
        if is_expired:
            still_held = [part for part, state in zip(parts, states, strict=True) if state is None]
            self.release(parts)
            await self.nack(still_held)
            return Settlement.EXPIRED
        late = list(filter(None, await asyncio.gather(*(self._ack(*part) for part in parts))))
        if decision and late:
            self._start(self._settle(coordinator, decision, late))
        elif decision:
            await self._settle(coordinator, decision, late)
        return Settlement.DONE

    async def _ack(self, shard: str, uid: str) -> asyncio.Task[None] | None:
        """It is decided: a shard that is away is tried until it is back. Returns the task that does so."""
        try:
            await self._shards.at(shard).ack(uid)
            self.release([(shard, uid)])
            return None
        except PoolUnavailable as failure:
            log.warning("an acknowledgement will be delivered when the shard is back: %s", failure)
            return self._start(self._ack_later(shard, uid))

    async def _settle(self, coordinator: str, decision: str, late: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*late)
        with suppress(PoolUnavailable):  # it keeps the decision: a row of its journal
            await self._shards.at(coordinator).settle(decision)

    async def _ack_later(self, shard: str, uid: str) -> None:
        while True:
            await asyncio.sleep(RETRY_PAUSE)
            try:
                await self._shards.at(shard).ack(uid)
            except PoolUnavailable:
                continue
            self.release([(shard, uid)])
            return

    async def _put_back(self, shard: str, uid: str) -> None:
        try:
            await self._shards.at(shard).put_back(uid)
        except PoolUnavailable:
            return  # without heartbeats it returns by itself

    async def _beat(self) -> None:
        while self._held:
            await asyncio.sleep(self._interval)
            await asyncio.gather(*(self._renew(shard, uids) for shard, uids in _by_shard(self._held).items()))

    async def _renew(self, shard: str, uids: list[str]) -> None:
        """A lease that has ended needs no more heartbeats. One that is unknown may be on its way."""
        try:
            states = await self._shards.at(shard, timeout=HEARTBEAT_ANSWER, await_restart=False).renew(uids)
        except Exception as failure:  # noqa: BLE001 - the next heartbeat is sent, whatever became of this one
            log.debug("a heartbeat for shard %s failed: %s", shard, failure)
            return
        ended = (Settlement.DONE, Settlement.EXPIRED)
        self.release((shard, uid) for uid, state in zip(uids, states, strict=True) if state in ended)

    def _start(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _by_batch(leases: Iterable[PartLease]) -> list[list[PartLease]]:
    batches: dict[str, list[PartLease]] = {}
    for shard, uid in leases:
        batches.setdefault(batch_of_lease(uid), []).append((shard, uid))
    return list(batches.values())


def _by_shard(leases: Iterable[PartLease]) -> dict[str, list[str]]:
    uids: dict[str, list[str]] = {}
    for shard, uid in leases:
        uids.setdefault(shard, []).append(uid)
    return uids


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
