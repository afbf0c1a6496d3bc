"""The calls of consumers to a shard: groups are leased, acknowledged and returned."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from stepwell.pool.api.leasing import (
    DECISION,
    BatchRequest,
    ExactFill,
    GroupOffer,
    LeasedGroups,
    ReadyGroups,
    ReadySummary,
    Settlement,
    ShardPreview,
    decision_of,
)
from stepwell.pool.api.transport import ready_topic
from stepwell.pool.rules.leasing import LeaseHeartbeats
from stepwell.pool.shard.shard import Shard, ShardCalls

log = logging.getLogger("stepwell.pool")

HEARTBEAT_TIMEOUT = 10.0
"""Seconds after its last heartbeat that a trainer is taken for dead."""
TICKS = 10
"""How often silent holders are looked for within that time."""
DECISION_TIMEOUT = 2.0
"""Seconds that the coordinator of a batch may take to answer."""
UNIFORM = "nothing can be learned from them; do the agents send a fixed seed, or temperature 0?"


class ConsumerCalls(ShardCalls):
    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        transactions = shard.transactions
        self._heartbeats = LeaseHeartbeats(self.pool.state, transactions.heartbeat_timeout)
        self._lease_watch = LeaseWatch(self._heartbeats, transactions.heartbeat_timeout, self._end_silent)
        transactions.before_commit.append(self._watch_leases)
        self._next_uniform = 1
        """So many uniform groups are mentioned next in the log."""

    async def take(self, request: BatchRequest, lease: float, lease_uid: str) -> LeasedGroups | None:
        """The requested groups if they are ready now."""
        return await self._lease_out(partial(self.pool.leasing.take, request), lease_uid, lease)

    async def take_several(self, request: BatchRequest, lease: float, lease_uids: Sequence[str]) -> list[LeasedGroups]:
        """As many such batches as are ready now, each under the next of these names."""
        take, batches = partial(self.pool.leasing.take, request), []
        for uid in lease_uids:
            leased = self._try_lease(take, uid, lease)
            if leased is None:
                break
            batches.append(leased)
        await self._transactions.commit()
        return batches

    async def ack(self, lease_uid: str) -> Settlement:
        async with self._transactions.transaction():
            return self.pool.leasing.ack(lease_uid)

    async def ack_several(self, lease_uids: Sequence[str]) -> list[Settlement]:
        async with self._transactions.transaction():
            return [self.pool.leasing.ack(uid) for uid in lease_uids]

    async def settle(self, decision_uid: str) -> None:
        """The holder of an acknowledged batch knows that all shards have ended their parts. Tells the coordinator."""
        async with self._transactions.transaction():
            self.pool.leasing.settle(decision_uid)

    async def renew(self, lease_uids: Sequence[str]) -> list[Settlement | None]:
        """A heartbeat: the holder of these leases is alive. For each: None if it still holds it, else how it ended.

        If the name of a decision is among them, the holder is about to acknowledge the others.
        """
        async with self._transactions.transaction():
            if any(uid.endswith(DECISION) for uid in lease_uids):
                self.pool.leasing.prepare(lease_uids)
            return self._heartbeats.renew(lease_uids)

    async def nack(self, lease_uid: str) -> Settlement:
        async with self._transactions.transaction():
            return self.pool.leasing.nack(lease_uid)

    async def peek(self, request: BatchRequest) -> ReadySummary:
        async with self._transactions.transaction():
            self.pool.leasing.check(request)
            return self._summary(request)

    async def waiting_for(self, request: BatchRequest) -> str:
        self._transactions.check_open()
        return self.pool.waiting_for(request)

    async def offers(self, request: ExactFill) -> list[GroupOffer]:
        """Groups that can be part of the batch."""
        async with self._transactions.transaction():
            return self.pool.leasing.offers(request, self._transactions.name)

    async def take_offers(
        self, request: ExactFill, offers: Sequence[GroupOffer], lease_uid: str
    ) -> LeasedGroups | None:
        """None if one of the offered groups is gone."""
        return await self._lease_out(partial(self.pool.leasing.take_offers, request, offers), lease_uid, request.lease)

    async def fill(self, request: ExactFill, lease_uid: str) -> LeasedGroups | None:
        """The batch from this shard alone; None if there is none now."""
        return await self._lease_out(partial(self.pool.leasing.fill, request), lease_uid, request.lease)

    async def put_back(self, lease_uid: str) -> Settlement:
        """Return groups that no consumer has seen: this counts as no attempt."""
        async with self._transactions.transaction():
            return self.pool.leasing.nack(lease_uid, attempted=False)

    async def ready_groups(self, channel: str) -> ReadyGroups:
        async with self._transactions.transaction():
            return self.pool.ready_groups(channel)

    async def preview(self, channel: str, request: BatchRequest | ExactFill | None = None) -> ShardPreview:
        """What the shard would hand out; without a request, for the last that a consumer made. Nothing is taken."""
        async with self._transactions.transaction():
            return self.pool.preview(channel, request)

    async def clear(self, channel: str) -> int:
        """Drop all groups that are not leased. Returns their number."""
        async with self._transactions.transaction():
            return self.pool.clear(channel)

    def _summary(self, request: BatchRequest) -> ReadySummary:
        ready, nothing_after = self.pool.ready_items(request), self.pool.nothing_after(request)
        self.shard.news.look()
        revision = self.shard.news.item(ready_topic(request.channel)).revision
        return ReadySummary(revision, ready.ages, nothing_after, ready.users)

    async def _lease_out(
        self, take: Callable[[str, float], LeasedGroups | None], lease_uid: str, lease: float
    ) -> LeasedGroups | None:
        """What `take` finds, under a lease of that name and so many seconds."""
        leased = self._try_lease(take, lease_uid, lease)
        await self._transactions.commit()
        return leased

    def _try_lease(
        self, take: Callable[[str, float], LeasedGroups | None], lease_uid: str, lease: float
    ) -> LeasedGroups | None:
        """As `_lease_out`, before the commit."""
        self._transactions.begin()
        leased = take(lease_uid, self._transactions.pool_time() + lease)
        self._say_uniform()
        return None if leased is None else replace(leased, leases=((self._transactions.name, lease_uid),))

    def _say_uniform(self) -> None:
        """At the first, second, fourth, eighth group, and so on."""
        count = self.pool.state.uniform_groups
        if count >= self._next_uniform:
            self._next_uniform = 2 * count
            name = self._transactions.name
            log.warning("shard %s: in %d groups all rollouts are the same; %s", name, count, UNIFORM)

    def _watch_leases(self) -> None:
        if self._has_leases():
            self._lease_watch.start()

    async def _end_silent(self, lease_uids: Sequence[str]) -> bool:
        """Return the data of these leases, unless they are acknowledged. False if no lease is left."""
        doubtful = self.pool.leasing.take_doubtful(lease_uids)
        decisions = {uid: await self._decision(uid) for uid in doubtful}
        trained = [uid for uid, how in decisions.items() if how is Settlement.DONE]
        undecided = [uid for uid, how in decisions.items() if how is None]
        silent = [uid for uid in {*lease_uids, *doubtful} if uid not in trained and uid not in undecided]
        if trained or silent:
            name = self._transactions.name
            log.warning(
                "shard %s: the holders of %d leases are silent: %d return, %d are acknowledged",
                *(name, len(trained) + len(silent), len(silent), len(trained)),
            )
            async with self._transactions.transaction():
                self._settle_silent(silent, trained)
        return self._has_leases()

    def _has_leases(self) -> bool:
        return bool(self.pool.state.leases or self.pool.state.reward_leases)

    def _settle_silent(self, silent: Sequence[str], trained: Sequence[str]) -> None:
        for uid in trained:
            self.pool.leasing.ack(uid)
        self.pool.leasing.end_silent(silent)
        self.pool.rewards_due.end_silent(silent)

    async def _decision(self, lease_uid: str) -> Settlement | None:
        """What the coordinator of its batch says; None if it cannot be asked now. If it has not decided yet, the batch
        is not acknowledged any more."""
        coordinator, uid = decision_of(lease_uid) or ("", "")
        if coordinator == self._transactions.name:
            return await self.nack(uid)
        if self._transactions.ask_decision is None:
            return Settlement.EXPIRED
        try:
            async with asyncio.timeout(DECISION_TIMEOUT):
                return await self._transactions.ask_decision(coordinator, uid)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the lease waits for the decision
            log.warning("lease %s waits for the decision of shard %s: %r", lease_uid, coordinator, failure)
            return None


class LeaseWatch:
    """Looks for silent holders of leases, as long as there are leases."""

    def __init__(
        self, heartbeats: LeaseHeartbeats, timeout: float, end: Callable[[Sequence[str]], Awaitable[bool]]
    ) -> None:
        """`end` is called now and then with the leases of silent holders; it says whether leases are left."""
        self._heartbeats = heartbeats
        self._tick = timeout / TICKS
        self._end = end
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Doing it again is harmless."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """A time in which this process was stopped counts as little more than a tick."""
        are_left = True
        while are_left:
            began = time.monotonic()
            await asyncio.sleep(self._tick)
            silent = self._heartbeats.pass_time(min(time.monotonic() - began, 2 * self._tick))
            are_left = await self._end(silent)
