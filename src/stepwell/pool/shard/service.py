"""One shard of the DataPool as a service: the calls that clients make to a shard. It holds no rule.

- A plain class: Ray is added in pool/actors.py.
- A call may be repeated after a lost answer. What it changes is in the journal before it answers.
- Steps travel packed, in both directions.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from stepwell.errors import PoolUnavailable, StepwellError
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
from stepwell.pool.api.plan import GroupElsewhere, PoolPlan
from stepwell.pool.api.policy import Serving
from stepwell.pool.api.producing import TRAIN, FlushNeeded, Pacing
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.transport import News, Seen, flush_topic, ready_topic
from stepwell.pool.api.watching import ChangesPage, Cursor
from stepwell.pool.shard.operation import LongOperation, Operation, ShardRoute
from stepwell.pool.shard.shard import Shard
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject, Step

log = logging.getLogger("stepwell.pool")

P = TypeVar("P")

OF_0_2 = (
    "this pool is of release 0.3, and the process that asks is of 0.2: bring it to the release of the pool; its steps "
    "wait meanwhile"
)
GC_THRESHOLD = (100_000, 50, 100)
"""A pool holds many objects without cycles; the search for cycles among them is useless work."""
UNIFORM = "nothing can be learned from them; do the agents send a fixed seed, or temperature 0?"


class ShardService:
    """Every call to a shard. Clients get these methods from `ShardSet.at`."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.pool = shard.pool
        self._next_uniform = 1
        """So many uniform groups are mentioned next in the log."""

    # -- operations ----------------------------------------------------------------------------------------------------

    async def run(self, operations: Sequence[Operation[Any]], revision: int | None = None) -> list[Any]:
        """One answer for each operation, or the exception by which it is refused. What they change is in the journal.

        Here and below, `revision` is that of the plan by which the caller has chosen this shard for a group.
        """
        self.shard.check_open()
        if any(operation.route is ShardRoute.GROUP for operation in operations):
            self.shard.check_routed(revision)
        if not any(operation.changes for operation in operations):
            return [self._run(operation) for operation in operations]
        async with self.shard.transaction():
            return [self._run(operation) for operation in operations]

    async def answer(self, *_: object, **__: object) -> NoReturn:
        """Processes of 0.2 call it, under four names. They keep their steps, and say why."""
        raise PoolUnavailable(OF_0_2)

    submit_steps = submit_groups = give_reward = answer

    async def run_flushed(self, operation: Operation[Any], timeout: float, revision: int | None = None) -> Any:
        """Run an operation as soon as no other living gateway holds steps that it needs."""
        self.shard.check_routed(revision)
        deadline = time.monotonic() + timeout
        while True:
            (answer,) = await self.run([operation], self.shard.plan.revision)
            if not isinstance(answer, FlushNeeded):
                break
            try:
                await self._await_flushes(answer.trajectory_uid, answer.gateway, timeout, deadline)
            except PoolUnavailable:
                if operation.is_patient:
                    raise
                operation = replace(operation, gateway="")  # type: ignore[type-var]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run_long(self, operation: LongOperation[P]) -> P:
        """Run an operation to its end, which may be far away. It goes on if nobody waits for it."""
        self.shard.check_open()
        return await operation.run(self.shard)

    async def flushed(self, gateway: str, trajectory_uids: Sequence[str]) -> None:
        """The gateway holds no step of these trajectories."""
        self.shard.check_open()
        for trajectory in filter(None, map(self.pool.state.trajectories.get, trajectory_uids)):
            self.pool.state.set_gateways(trajectory, {*trajectory.gateways} - {gateway})
        for follow in self.shard.on_flushed:
            follow(gateway, trajectory_uids)
        self.shard.gateways.notify()

    async def leave(self, gateway: str) -> None:
        """The gateway ends, and holds nothing."""
        async with self.shard.transaction():
            self.shard.gateways.leave(gateway)
            self.shard.news.remove(flush_topic(gateway))
            self.pool.state.lose_gateway(gateway, is_dead=False)
            self.pool.state.set_living_gateways(self.shard.gateways.living())

    async def wait_news(self, asker: str, seen: Seen, timeout: float) -> News:
        """Returns news as soon as one of the topics is not as it was seen; nothing after `timeout`. A later question of
        the same asker ends the earlier one."""
        return await self.shard.news.wait(asker, seen, timeout)

    # -- consumers: groups are leased, acknowledged and returned -------------------------------------------------------

    async def take(self, request: BatchRequest, lease: float, lease_uid: str) -> LeasedGroups | None:
        """The requested groups if they are ready now."""
        return await self._lease_out(partial(self.pool.leasing.take, request), lease_uid, lease)

    async def take_several(self, request: BatchRequest, lease: float, lease_uids: Sequence[str]) -> list[LeasedGroups]:
        """Leases as many such batches as are ready now, each under the next of `lease_uids`."""
        take, batches = partial(self.pool.leasing.take, request), []
        for uid in lease_uids:
            leased = self._try_lease(take, uid, lease)
            if leased is None:
                break
            batches.append(leased)
        await self.shard.commit()
        return batches

    async def ack(self, lease_uid: str) -> Settlement:
        async with self.shard.transaction():
            return self.pool.leasing.ack(lease_uid)

    async def ack_several(self, lease_uids: Sequence[str]) -> list[Settlement]:
        async with self.shard.transaction():
            return [self.pool.leasing.ack(uid) for uid in lease_uids]

    async def settle(self, decision_uid: str) -> None:
        """The holder of an acknowledged batch knows that all shards have ended their parts. Tells the coordinator."""
        async with self.shard.transaction():
            self.pool.leasing.settle(decision_uid)

    async def renew(self, lease_uids: Sequence[str]) -> list[Settlement | None]:
        """A heartbeat: the holder of these leases is alive. For each: None if it still holds it, else how it ended.

        If the name of a decision is among them, the holder is about to acknowledge the others.
        """
        async with self.shard.transaction():
            if any(uid.endswith(DECISION) for uid in lease_uids):
                self.pool.leasing.prepare(lease_uids)
            return self.shard.heartbeats.renew(lease_uids)

    async def nack(self, lease_uid: str) -> Settlement:
        async with self.shard.transaction():
            return self.pool.leasing.nack(lease_uid)

    async def peek(self, request: BatchRequest) -> ReadySummary:
        async with self.shard.transaction():
            self.pool.leasing.check(request)
            return self._summary(request)

    async def waiting_for(self, request: BatchRequest) -> str:
        self.shard.check_open()
        return self.pool.waiting_for(request)

    async def offers(self, request: ExactFill) -> list[GroupOffer]:
        """Groups that can be part of the batch."""
        async with self.shard.transaction():
            return self.pool.leasing.offers(request, self.shard.name)

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
        async with self.shard.transaction():
            return self.pool.leasing.nack(lease_uid, attempted=False)

    async def ready_groups(self, channel: str) -> ReadyGroups:
        async with self.shard.transaction():
            return self.pool.ready_groups(channel)

    async def preview(self, channel: str, request: BatchRequest | ExactFill | None = None) -> ShardPreview:
        """What the shard would hand out; without a request, for the last that a consumer made. Nothing is taken."""
        async with self.shard.transaction():
            return self.pool.preview(channel, request)

    async def clear(self, channel: str) -> int:
        """Drop all groups that are not leased. Returns their number."""
        async with self.shard.transaction():
            return self.pool.clear(channel)

    # -- watchers --------------------------------------------------------------------------------------------------

    async def changes(self, cursor: Cursor, limit: int) -> ChangesPage:
        """Changes since the cursor; all trajectories if the shard has restarted since it gave the cursor."""
        async with self.shard.transaction():
            reset = cursor.epoch != self.shard.watch_epoch or self.pool.state.change_log.misses(cursor.position)
            page = self.pool.view.page(0 if reset else cursor.position, limit)
        snapshots = [snapshot[:-1] for snapshot in page.snapshots]
        return ChangesPage(snapshots, Cursor(epoch=self.shard.watch_epoch, position=page.position), reset, page.more)

    async def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """The steps of each (trajectory_uid, prompt_uid), and how many each has."""
        self.shard.check_open()
        return self.pool.view.read(uids)

    async def stats(self) -> PoolStats:
        async with self.shard.transaction():
            short_of_disk = int(self.shard.disk_shortage() is not None)
            stats = replace(self.pool.stats(), short_of_disk=short_of_disk)
            for add in self.shard.on_stats:
                stats = add(stats)
        return stats if self.shard.archive is None else replace(stats, archiving=self.shard.archive.stats())

    async def pacing(self, channel: str = TRAIN) -> Pacing:
        async with self.shard.transaction():
            return self.pool.pacing(channel)

    async def quarantined(self) -> list[Step]:
        """The last quarantined steps, each with its reason."""
        self.shard.check_open()
        return list(self.pool.state.quarantine)

    # -- what serves the policy ----------------------------------------------------------------------------------------

    async def set_policy_version(self, version: int, withdrawn: tuple[int, ...] | None = None) -> Serving:
        """Tokens that are sampled from now on come from these weights. What the withdrawn versions said is not trained;
        None leaves them as they are."""
        async with self.shard.transaction():
            self.pool.state.set_policy_version(version, withdrawn)
        return self.shard.serving

    async def set_adapter(self, channel: str, adapter: str, version: int) -> Serving:
        """The channel's calls are answered by this adapter from now on, and its steps age by this version."""
        async with self.shard.transaction():
            self.pool.state.set_adapter(channel, adapter, version)
        return self.shard.serving

    async def serving(self) -> Serving:
        """Returns what serves the policy now."""
        self.shard.check_open()
        return self.shard.serving

    # -- the layout of the shards --------------------------------------------------------------------------------------

    async def plan(self) -> PoolPlan:
        self.shard.check_open()
        return self.shard.plan

    async def adopt_plan(self, plan: PoolPlan) -> PoolPlan:
        """Follow a newer plan. Returns the plan that the shard follows."""
        async with self.shard.transaction():
            self.shard.adopt(plan)
        return self.shard.plan

    async def shared_rows(self) -> dict[str, JsonObject]:
        """What slices share with other shards when the number of shards changes, by the name of the slice."""
        self.shard.check_open()
        return {part.name: dict(rows) for part in self.pool.state.slices if (rows := part.shared())}

    async def merge_rows(self, shared: Mapping[str, JsonObject]) -> None:
        """Take over what another shard shares."""
        async with self.shard.transaction():
            for part in self.pool.state.slices:
                if part.name in shared:
                    part.merge(shared[part.name])

    async def undrained(self) -> int:
        """What keeps a change of the shards from its end: groups that belong to other shards by now, leases on which a
        shard that is to go decides, and, if this one is to go, what is on its way to the archive."""
        plan = self.shard.plan
        leaves = self.pool.state.shard >= plan.shards
        async with self.shard.transaction():
            if leaves:
                self.pool.state.retire_history()
        archives = leaves and self.shard.archive is not None and self.shard.archive.has_work
        decisions = filter(None, map(decision_of, self.pool.state.leases))
        undecided = sum(coordinator in plan.shard_names()[plan.shards :] for coordinator, _ in decisions)
        return self.pool.state.misplaced() + undecided + archives

    async def tombstones(self) -> dict[str, float]:
        """The digests of the subjects of which nothing is taken, each with the time at which that was asked for."""
        self.shard.check_open()
        found = self.pool.state.tombstones.subjects.values()
        return {tombstone.subject: tombstone.at for tombstone in found if not tombstone.is_of_age}

    async def adopt_tombstones(self, subjects: Mapping[str, float]) -> None:
        """A shard that joins the pool takes nothing of them either."""
        async with self.shard.transaction():
            for subject, at in subjects.items():
                self.pool.state.refuse_subject(subject, at)

    def _run(self, operation: Operation[Any]) -> Any:
        try:
            return (
                GroupElsewhere(operation.routed_by) if operation.is_elsewhere(self.shard) else operation.run(self.shard)
            )
        except (StepwellError, FlushNeeded) as refusal:
            return refusal
        except Exception as failure:
            log.exception("shard %s failed to run %s", self.shard.name, operation)
            return failure

    async def _await_flushes(self, trajectory_uid: str, gateway: str, timeout: float, deadline: float) -> None:
        """Until no other living gateway holds steps of the trajectory."""
        while holders := self.shard.holders(trajectory_uid, gateway):
            if time.monotonic() > deadline:
                raise PoolUnavailable(
                    f"{len(holders)} gateways have not sent their steps of trajectory {trajectory_uid} within "
                    f"{timeout:g} s; try again"
                )
            self.shard.gateways.ask_for(self.pool.state.trajectories[trajectory_uid], holders)
            await self.shard.gateways.wait(self.shard.recheck_interval)
            self.shard.check_open()

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
        await self.shard.commit()
        return leased

    def _try_lease(
        self, take: Callable[[str, float], LeasedGroups | None], lease_uid: str, lease: float
    ) -> LeasedGroups | None:
        """Does what `_lease_out` does before the commit."""
        self.shard.begin()
        leased = take(lease_uid, self.shard.pool_time() + lease)
        self._say_uniform()
        return None if leased is None else replace(leased, leases=((self.shard.name, lease_uid),))

    def _say_uniform(self) -> None:
        """At the first, second, fourth, eighth group, and so on."""
        count = self.pool.state.uniform_groups
        if count >= self._next_uniform:
            self._next_uniform = 2 * count
            name = self.shard.name
            log.warning("shard %s: in %d groups all rollouts are the same; %s", name, count, UNIFORM)
