"""Fetching a batch from one or several shards, oldest ready groups first.

- A fetch that waits takes nothing. It takes its parts by calls of its own once there are enough, so a consumer that
  dies while it waits gets no batch.
- Waiting costs a call for each change of what is ready. A shard tells how much it has at most: it is asked what that is
  when it may be enough.
- A shard that does not answer holds up no other, unless the order is strict: after a moment, groups are taken without
  it. A part whose shard falls silent is looked for elsewhere. If it comes all the same, it is used if it is still
  missing, and put back otherwise. The other parts are kept by heartbeats meanwhile.
- With the pool's max_share_per_user, the limit is for the whole batch. Each shard is told how many of each user its
  part may have.
"""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, repeat
from operator import itemgetter
from typing import Any

from stepwell.errors import FetchTimeout, PoolUnavailable
from stepwell.pool.api.leasing import (
    BatchRequest,
    LeasedGroups,
    Order,
    ReadySummary,
    UserLimit,
    max_per_user,
    merge_leased_groups,
    new_batch_uid,
    part_lease_uid,
)
from stepwell.pool.api.transport import UNSEEN, NewsItem, ready_topic
from stepwell.pool.client.held_leases import HeldLeases
from stepwell.pool.client.shards import ShardSet

DELIVERY_LEASE = 60.0
"""Seconds. The lease of a batch that is acknowledged on arrival."""
LOOK_TIMEOUT = 2.0
"""Seconds. A shard that restarts is not waited for."""
LOOK_PATIENCE = 0.25
"""Seconds after which a fetch goes on without the shards that have not answered yet."""
TAKE_PATIENCE = 0.25
"""Seconds that a shard may take to hand out a part, and then to say anything at all, before it counts as silent."""
RETRY_PAUSE = 0.5
"""Seconds until a shard that is away is asked again."""


async def fetch_oldest(
    shards: ShardSet, held: HeldLeases, request: BatchRequest, timeout: float, lease: float
) -> LeasedGroups:
    """FetchTimeout says what is missing."""
    plan, request = await shards.plan(), replace(request, batch=request.count)
    share = plan.limits.max_share_per_user
    limit = None if share is None else UserLimit(max_per_user(share, request.count))
    fetch = _Fetch(shards, held, plan.shard_names(), request, lease, limit)
    try:
        return await fetch.run(timeout)
    except BaseException:
        fetch.put_back()
        raise
    finally:
        await fetch.close()


async def fetch_and_ack(shards: ShardSet, held: HeldLeases, request: BatchRequest, timeout: float) -> LeasedGroups:
    """The batch, acknowledged as soon as it has arrived."""
    leased = await fetch_oldest(shards, held, request, timeout, DELIVERY_LEASE)
    try:
        await held.ack(leased.leases)
    except BaseException:
        held.put_back(leased.leases)
        raise
    return leased


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What is taken from one shard."""

    count: int
    limit: UserLimit | None = None
    """What it may have of each user. None: no part of the batch is taken from elsewhere, or users are not limited."""

    def of(self, request: BatchRequest) -> BatchRequest:
        return limited(replace(request, count=self.count), self.limit)


class _Fetch:
    """One fetch. The parts that it has taken so far are leased."""

    def __init__(
        self,
        shards: ShardSet,
        held: HeldLeases,
        names: tuple[str, ...],
        request: BatchRequest,
        lease: float,
        limit: UserLimit | None,
    ) -> None:
        self._shards = shards
        self._held = held
        self._names = names
        self._request = request
        self._lease = lease
        self._uid = self._coordinator = ""
        """The name of the batch, and the first shard of which a part is taken."""
        self._numbers = count()
        self._parts: list[LeasedGroups] = []
        self._missing = request.count
        self._limit = limit
        """What the batch may have of each user, without the parts that are taken."""
        self._taken: Counter[str] = Counter()
        """How many of each user the parts may have that are taken."""
        self._summaries: dict[str, ReadySummary] = {}
        """What each shard could hand out, as far as it has answered."""
        self._counts: dict[str, NewsItem] = {}
        """How much each shard has at most, if that has changed since its summary."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        """By shard: the call that asks for its summary, or waits for a change."""
        self._late: dict[str, asyncio.Task[None]] = {}
        """By shard: the call that takes a part from it and is not answered yet. Nothing else is taken from it."""

    async def run(self, timeout: float) -> LeasedGroups:
        deadline = time.monotonic() + timeout
        if len(self._names) == 1:  # it need not be compared with others
            await self._take(self._names[0], BatchPart(self._missing))
        if self._missing:
            await self._look(self._names)
        await self._fill(deadline, timeout)
        while len(self._parts) > 1 and not self._has_coordinator():
            await self._rename()
            await self._fill(deadline, timeout)
        return merge_leased_groups(self._parts)

    async def _fill(self, deadline: float, timeout: float) -> None:
        while self._missing:
            if not self._tries_each_change and self._may_suffice():
                await self._look(tuple(self._counts))
            parts = self._choose_parts()
            is_enough = sum(part.count for part in parts.values()) == self._missing
            if is_enough:
                await asyncio.gather(*(self._take(name, part) for name, part in parts.items()))
            if not self._missing:
                break
            if time.monotonic() >= deadline:
                await self._give_up(timeout)
            if is_enough and not self._tries_each_change:
                await self._look(tuple(name for name in parts if name not in self._late))
            else:
                await self._await_change(max(0.01, deadline - time.monotonic()))
            self._names = await self._shards.names()
            for gone in {*self._summaries, *self._counts} - set(self._names):
                self._drop(gone)

    def _has_coordinator(self) -> bool:
        return any(shard == self._coordinator for part in self._parts for shard, _ in part.leases)

    async def _rename(self) -> None:
        """The coordinator must have a part, and answer. It does not answer, or another consumer was faster there: the
        parts are taken again."""
        put_back = self.put_back()
        self._uid, self._parts, self._missing = "", [], self._request.count
        self._taken.clear()
        await asyncio.wait(put_back, timeout=LOOK_TIMEOUT)
        await self._look(tuple(name for name in self._names if name not in self._late))

    def put_back(self) -> list[asyncio.Task[None]]:
        return self._held.put_back([lease for part in self._parts for lease in part.leases])

    async def close(self) -> None:
        calls = [*self._watches.values(), *self._late.values()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _look(self, names: tuple[str, ...]) -> None:
        """What these shards could hand out now. A shard that does not say so soon is waited for later."""
        looks = []
        for name in names:
            self._drop(name)
            looks.append(self._start_watch(name, self._peek(name)))
        if looks:
            done, _ = await asyncio.wait(looks, timeout=LOOK_PATIENCE)
            for look in done:
                look.result()

    def _start_watch(self, name: str, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if name in self._watches:
            self._watches[name].cancel()
        watch = self._watches[name] = asyncio.create_task(call)
        return watch

    async def _peek(self, name: str) -> None:
        """What the shard could hand out now."""
        shard = self._shards.at(name, timeout=LOOK_TIMEOUT, await_restart=False)
        with suppress(PoolUnavailable):
            request = limited(replace(self._request, count=self._missing), self._room)
            self._summaries[name] = await shard.peek(request)

    async def _watch(self, name: str) -> None:
        """How much the shard has, as soon as that is not what is known."""
        topic, revision = ready_topic(self._request.channel), UNSEEN
        if name in self._summaries:
            revision = self._counts[name].revision if name in self._counts else self._summaries[name].revision
        try:
            news = await self._shards.wait_news(name, {topic: revision})
            self._counts |= {name: news[topic]} if topic in news else {}
        except PoolUnavailable:
            self._drop(name)
            await asyncio.sleep(RETRY_PAUSE)

    def _drop(self, name: str) -> None:
        self._summaries.pop(name, None)
        self._counts.pop(name, None)

    def _may_suffice(self) -> bool:
        """Shards that have changed may have enough, together with the others."""
        unit = self._request.unit
        most = {name: len(summary.ages) for name, summary in self._summaries.items()}
        for name, item in self._counts.items():
            most[name] = self._missing if item.value is None else item.value.at_most(unit)
            if name not in self._summaries:  # what it has of this unit may not be counted before it is asked
                most[name] = self._missing
        return bool(self._counts) and sum(most.values()) >= self._missing

    async def _await_change(self, timeout: float) -> None:
        """Until what can be handed out has changed in one of the shards, a part has come late, or there are other
        shards."""
        for name in self._names:
            if name not in self._watches or self._watches[name].done():
                self._start_watch(name, self._watch(name))
        plan_changed = asyncio.create_task(self._shards.next_plan(timeout))
        calls = [*self._watches.values(), *self._late.values(), plan_changed]
        done, _ = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        plan_changed.cancel()
        self._late = {name: taking for name, taking in self._late.items() if taking not in done}
        for call in done:
            call.result()

    @property
    def _tries_each_change(self) -> bool:
        """Only the shard knows how much of the batch its history fills. If it is the only one, it can be tried."""
        return len(self._names) == 1 and self._request.history > 0

    @property
    def _room(self) -> UserLimit | None:
        """What may still be taken of each user."""
        return None if self._limit is None else self._limit.less(self._taken.elements())

    def _choose_parts(self) -> dict[str, BatchPart]:
        """What to take from each shard."""
        if self._may_miss_oldest():
            return {}
        heard = {name: summary for name, summary in self._summaries.items() if name not in self._late}
        if self._tries_each_change:
            return dict.fromkeys({*heard, *self._counts} - self._late.keys(), BatchPart(self._missing))
        return oldest_parts(heard, self._missing, self._room)

    def _may_miss_oldest(self) -> bool:
        """In strict order, a shard that does not answer may hold the oldest group."""
        heard = self._summaries.keys() - self._late.keys()
        return self._request.order is Order.STRICT and len(heard) < len(self._names)

    async def _take(self, name: str, part: BatchPart) -> None:
        """Returns also if the shard falls silent: it may have been cut off. A large part takes its time."""
        taking = asyncio.create_task(self._take_part(name, part))
        self._late[name] = taking
        while not (await asyncio.wait([taking], timeout=TAKE_PATIENCE))[0]:
            try:
                await self._shards.at(name, timeout=TAKE_PATIENCE, await_restart=False).plan()
            except PoolUnavailable:
                return
        del self._late[name]
        taking.result()

    async def _take_part(self, name: str, wanted: BatchPart) -> None:
        """Each part has its own lease. A part stays missing if another consumer took it first or its shard is away."""
        if not self._uid:
            self._uid = new_batch_uid(heartbeats=True, coordinator=name if len(self._names) > 1 else "")
            self._coordinator = name
        uid = self._uid
        lease = (name, part_lease_uid(uid, next(self._numbers)))
        shard = self._shards.at(name, await_restart=False)
        with self._held.holding(lease):
            try:
                take = shard.take(wanted.of(self._request), self._lease, lease[1])
                part = await self._shards.while_it_answers(name, take)
            except PoolUnavailable:
                self._held.put_back([lease])
                self._drop(name)
                return
        is_wanted = uid == self._uid and wanted.count <= self._missing and self._has_room(wanted)
        if part is None:
            self._held.release([lease])
        elif is_wanted:
            self._parts.append(part)
            self._missing -= wanted.count
            self._taken.update({} if wanted.limit is None else wanted.limit.rooms)
        else:  # other shards were faster, or the batch has another name by now
            self._held.put_back([lease])

    def _has_room(self, part: BatchPart) -> bool:
        """Another part may have come meanwhile."""
        room = self._room
        return part.limit is None or room is None or all(n <= room.room(u) for u, n in part.limit.rooms.items())

    def _as_limited(self) -> dict[str, BatchRequest]:
        """By shard: the request with what would be taken of each user, for shards that have answered. So a shard knows
        what of its data is held back because of data of others."""
        if self._limit is None or self._may_miss_oldest():
            return {}
        heard = dict.fromkeys(self._summaries.keys() - self._late.keys(), BatchPart(0, UserLimit(0)))
        return {name: limited(self._request, part.limit) for name, part in (heard | self._choose_parts()).items()}

    async def _give_up(self, timeout: float) -> None:
        if self._limit is not None:
            await self._look(tuple(self._counts))
        requests = self._as_limited()
        answer = await self._shards.ask_each(lambda name, shard: shard.waiting_for(requests.get(name, self._request)))
        if len(self._names) == 1:
            raise FetchTimeout(f"waited {timeout:g} s for {answer.parts[0]}")
        texts = [f"{name}: {answer.by_shard.get(name, 'it does not answer')}" for name in self._names]
        raise FetchTimeout(f"waited {timeout:g} s over {len(self._names)} shards. {'; '.join(texts)}")


def limited(request: BatchRequest, limit: UserLimit | None) -> BatchRequest:
    return request if limit is None else replace(request, max_per_user=limit.most, user_rooms=dict(limit.rooms))


def oldest_parts(summaries: dict[str, ReadySummary], count: int, limit: UserLimit | None) -> dict[str, BatchPart]:
    """What to take from each shard, so that together it is the oldest that the limit allows."""
    until = min((summary.nothing_after for summary in summaries.values()), default=0.0)
    items = [
        (age, name, user)
        for name, summary in summaries.items()
        for age, user in zip(summary.ages, summary.users or repeat(""), strict=False)
        if age <= until
    ]
    if limit is not None:
        items = limit.keep(sorted(items), itemgetter(2))
    users: dict[str, list[str]] = {}
    for _, name, user in heapq.nsmallest(count, items):
        users.setdefault(name, []).append(user)
    limits = {name: None if limit is None else UserLimit(0, Counter(filter(None, users[name]))) for name in users}
    return {name: BatchPart(len(found), limits[name]) for name, found in users.items()}


async def take_ready(
    shards: ShardSet, held: HeldLeases, request: BatchRequest, most: int, lease: float
) -> list[LeasedGroups]:
    """Of each shard its oldest ones, as many as are ready now, `most` of all shards together. A shard that is away has
    none."""
    names, request = await shards.names(), replace(request, batch=most)
    sizes = [(most + number) // len(names) for number in range(len(names))]
    taken: list[LeasedGroups] = []
    try:
        async with asyncio.TaskGroup() as calls:
            for name, size in zip(names, sizes, strict=True):
                if size:
                    calls.create_task(_take_of(shards, held, name, request, size, lease, taken))
    except BaseException as failure:
        held.put_back([part for batch in taken for part in batch.leases])
        if isinstance(failure, BaseExceptionGroup):
            raise failure.exceptions[0] from None
        raise
    return sorted(taken, key=lambda batch: batch.opened_at[0])


async def _take_of(
    shards: ShardSet,
    held: HeldLeases,
    name: str,
    request: BatchRequest,
    most: int,
    lease: float,
    taken: list[LeasedGroups],
) -> None:
    leases = [(name, part_lease_uid(new_batch_uid(heartbeats=True), 0)) for _ in range(most)]
    with held.holding(*leases):
        try:
            take = shards.at(name, await_restart=False).take_several(request, lease, [uid for _, uid in leases])
            batches = await shards.while_it_answers(name, take)
        except PoolUnavailable:
            held.put_back(leases)
            return
    held.release(leases[len(batches) :])
    taken += batches
