"""One shard of the DataPool as a service: the pool's rules with a clock, files and waiting calls. It holds no rule.

- A plain class: Ray is added in actor.py.
- A call may be repeated after a lost answer. What it changes is in the journal before it answers.
- If a commit fails, the state in memory is ahead of the journal: no call is answered any more, and the process ends.
- Steps travel packed, in both directions.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar, assert_never
from uuid import uuid4

from stepwell.errors import FetchTimeout, PoolUnavailable, StepwellError
from stepwell.pool.api.curation import AuditEntry, Curation, CurationAction, CurationOutcome
from stepwell.pool.api.leasing import (
    BatchRequest,
    ExactFill,
    GroupOffer,
    LeasedGroups,
    ReadyGroups,
    ReadySummary,
    Settlement,
)
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import (
    TRAIN,
    AbortCall,
    CompleteCall,
    EndResult,
    FlushNeeded,
    KnowsCall,
    ProducerAnswer,
    ProducerCall,
    Registration,
    RewardGiven,
    SubmitVerdict,
)
from stepwell.pool.api.scoring import Judgement, JudgementOutcome
from stepwell.pool.api.series import SeriesChunk
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import ChangesPage, Cursor
from stepwell.pool.rules.heartbeats import LeaseHeartbeats
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.disk_floor import DiskFloor
from stepwell.pool.shard.gateway_roster import GatewayRoster
from stepwell.pool.shard.group_commit import GroupCommit
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.late_rewards import LateReward, reward_of_relabel
from stepwell.pool.shard.lease_watch import HEARTBEAT_TIMEOUT, LeaseWatch
from stepwell.pool.shard.recovery import restore_pool
from stepwell.steps.columns import Columns
from stepwell.steps.step import Step

log = logging.getLogger("stepwell.pool")

T = TypeVar("T")

UNIFORM = "nothing can be learned from them; do the agents send a fixed seed, or temperature 0?"


class ShardService:
    """Every call to a shard. Clients get these methods from `ShardSet.at`."""

    def __init__(
        self,
        plan: PoolPlan,
        name: str,
        *,
        journal: ShardJournal | None = None,
        archive: ParquetArchive | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        recheck_interval: float = 1.0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        refusal: str | None = None,
        on_journal_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """The pool is restored from the journal. `clock` gives wall-clock seconds. Leases and deadlines count
        `monotonic` ones, and go on where they stood when the shard ended.

        With a refusal, every call is answered with it: the journal cannot be used. `on_journal_failure` ends the
        process, so that another one can start.

        A waiting call looks again after `recheck_interval` seconds, because leases and deadlines end by themselves. A
        lease whose holder sent no heartbeat for `heartbeat_timeout` seconds returns.
        """
        self._plan = plan
        self._name = name
        self._journal = journal
        self._archive = archive
        self._clock = clock
        self._monotonic = monotonic
        self._recheck_interval = recheck_interval
        self.pool = Pool(plan.limits, journal)
        """The rules and the state. Other code in the same process may read them."""
        if journal is not None:
            log.info("shard %s restored %s", name, restore_pool(self.pool, journal))
        stopped_at = None if journal is None else journal.pool_time()
        self._pool_time_offset = (clock() if stopped_at is None else stopped_at) - monotonic()
        self._refusal = refusal
        self._on_journal_failure = on_journal_failure
        self._commits = GroupCommit(self._write_journal, self._end)
        self._floor: DiskFloor | None = None
        if journal is not None:
            store = journal.store
            self._floor = DiskFloor(plan.min_free_bytes, store.free_bytes, shard=name, place=store.name)
        self._gateways = GatewayRoster(self.pool.state.gateways, monotonic)
        self._heartbeats = LeaseHeartbeats(self.pool.state, heartbeat_timeout)
        self._lease_watch = LeaseWatch(self._heartbeats, heartbeat_timeout, self._end_silent)
        self._epoch = uuid4().hex
        self._state = 0
        """Counts the changes after which something may have become ready."""
        self._changed = asyncio.Condition()
        self._serving_changed = asyncio.Condition()
        self._has_unscored = asyncio.Event()
        self._next_uniform = 1
        """So many uniform groups are mentioned next in the log."""

    async def plan(self) -> PoolPlan:
        self._check_open()
        return self._plan

    # -- producers -----------------------------------------------------------------------------------------------------

    async def answer(self, calls: Sequence[ProducerCall]) -> list[ProducerAnswer | Exception]:
        """One answer for each call, or the exception by which it is refused."""
        shortage = self._disk_shortage()
        async with self._transaction():
            answers = [self._answer(call, shortage) for call in calls]
        if any(isinstance(call, CompleteCall) for call in calls):
            await self._notify()
        return answers

    async def flush_requests(self, gateway: str, timeout: float) -> list[str]:
        """The trajectories of which this gateway must send all steps that it holds. Waits until there are some."""
        return await self._gateways.requests(gateway, timeout)

    async def flushed(self, gateway: str, trajectory_uids: Sequence[str]) -> None:
        """The gateway holds no step of these trajectories."""
        for trajectory in filter(None, map(self.pool.state.trajectories.get, trajectory_uids)):
            self.pool.state.set_gateways(trajectory, self._gateways.holders(trajectory, but=gateway))
        self._gateways.notify()

    async def leave(self, gateway: str) -> None:
        """The gateway ends, and holds nothing."""
        self._gateways.leave(gateway)
        self.pool.state.set_living_gateways(self._gateways.living())

    async def complete_flushed(self, call: CompleteCall, timeout: float) -> EndResult:
        """Complete a trajectory as soon as no other living gateway holds steps of it."""
        deadline = time.monotonic() + timeout
        while holders := self._holders(call):
            if time.monotonic() > deadline:
                raise PoolUnavailable(
                    f"{len(holders)} gateways have not sent their steps of trajectory {call.trajectory_uid} within "
                    f"{timeout:g} s; try again"
                )
            for gateway in holders:
                self._gateways.ask(gateway, call.trajectory_uid)
            await self._gateways.wait(self._recheck_interval)
        (answer,) = await self.answer([call])
        if isinstance(answer, FlushNeeded):  # a gateway has come since
            return await self.complete_flushed(call, max(0.0, deadline - time.monotonic()))
        if isinstance(answer, Exception):
            raise answer
        return EndResult(str(answer))

    async def submit_steps(
        self, steps: Columns, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        self._check_room()
        return await self._change(lambda: self.pool.ingest.submit(steps, channel=channel, group_size=group_size))

    async def submit_groups(self, steps: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        self._check_room()
        return await self._change(lambda: self.pool.ingest.submit_groups(steps, registrations))

    async def give_reward(self, reward: RewardGiven) -> bool:
        """True if the reward is kept: for training or, if its trajectory was already shipped, in the archive."""
        async with self._transaction():
            kept = self.pool.ingest.reward(reward)
            if not kept and not self.pool.curator.holds_reward_of(reward.trajectory_uid):
                kept = self._keep_late(reward)
        await self._notify()
        return kept

    async def pacing(self, channel: str = TRAIN) -> Pacing:
        async with self._transaction():
            return self.pool.pacing(channel)

    # -- consumers -----------------------------------------------------------------------------------------------------

    async def fetch_batch(
        self, request: BatchRequest, timeout: float = 60.0, lease: float | None = None, lease_uid: str = ""
    ) -> LeasedGroups:
        """The requested groups, as soon as they are ready. FetchTimeout says what is missing.

        With a lease, they come back unless they are acknowledged in so many seconds. Without, they count as trained.
        """
        take, uid = partial(self.pool.leasing.take, request), lease_uid or uuid4().hex
        leased = await self._wait_until(lambda: self._try_lease(take, uid, lease), timeout)
        await self._commit()
        if leased is None:
            raise FetchTimeout(f"waited {timeout:g} s for {self.pool.waiting_for(request)}")
        return leased

    async def take(self, request: BatchRequest, lease: float, lease_uid: str) -> LeasedGroups | None:
        """The requested groups if they are ready now."""
        return await self._lease_out(partial(self.pool.leasing.take, request), lease_uid, lease)

    async def ack(self, lease_uid: str) -> Settlement:
        async with self._transaction():
            return self.pool.leasing.ack(lease_uid)

    async def renew(self, lease_uids: Sequence[str]) -> list[Settlement | None]:
        """A heartbeat: the holder of these leases is alive. For each: None if it still holds it, else how it ended."""
        async with self._transaction():
            return self._heartbeats.renew(lease_uids)

    async def nack(self, lease_uid: str) -> Settlement:
        return await self._change(lambda: self.pool.leasing.nack(lease_uid))

    async def peek(self, request: BatchRequest) -> ReadySummary:
        async with self._transaction():
            self.pool.leasing.check(request)
            return ReadySummary(self._state, self.pool.ready_ages(request), self.pool.nothing_after(request))

    async def watch_ready(self, request: BatchRequest, seen: ReadySummary | None, timeout: float) -> ReadySummary:
        """What could be handed out, as soon as it differs from `seen`, or after `timeout`. Nothing is taken, so a
        consumer that dies while it waits takes nothing."""
        ready = await self.peek(request)
        if seen is not None and ready[1:] == seen[1:]:
            await self._wait_until(lambda: self._ready_differs(request, seen), timeout)
            ready = await self.peek(request)
        return ready

    async def waiting_for(self, request: BatchRequest) -> str:
        self._check_open()
        return self.pool.waiting_for(request)

    async def offers(self, request: ExactFill) -> list[GroupOffer]:
        """Groups that can be part of the batch."""
        async with self._transaction():
            return self.pool.leasing.offers(request, self._name)

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
        return await self._change(lambda: self.pool.leasing.nack(lease_uid, attempted=False))

    async def ready_groups(self, channel: str) -> ReadyGroups:
        async with self._transaction():
            return self.pool.ready_groups(channel)

    async def clear(self, channel: str) -> int:
        """Drop all groups that are not leased. Returns their number."""
        async with self._transaction():
            return self.pool.clear(channel)

    # -- reward workers ------------------------------------------------------------------------------------------------

    async def wait_unscored(self, timeout: float) -> bool:
        """True as soon as a trajectory lacks a reward; False after `timeout`."""
        deadline = time.monotonic() + timeout
        while True:
            async with self._transaction():
                pass
            left = min(deadline - time.monotonic(), self._recheck_interval)
            if self._has_unscored.is_set() or left <= 0:
                return self._has_unscored.is_set()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._has_unscored.wait()

    async def take_unscored(self, count: int, lease: float, lease_uid: str) -> Columns | None:
        """All steps of up to `count` trajectories that lack a reward. Those not judged in `lease` seconds come back."""
        async with self._transaction():
            return self.pool.rewards_due.take(count, lease_uid, self._pool_time() + lease)

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        """For each judgement, whether it counted."""
        async with self._transaction():
            counted = self.pool.rewards_due.settle(judgements)
        failed = [judgement for judgement in judgements if judgement.attempt.outcome is not JudgementOutcome.SCORE]
        if failed:
            first = failed[0]
            text = "%d of %d trajectories could not be scored now; the first, %s, by %s: %s: %s"
            details = (first.trajectory_uid, first.source, first.attempt.outcome, first.attempt.why)
            log.warning(text, len(failed), len(judgements), *details)
        await self._notify()
        return counted

    # -- watchers and people -------------------------------------------------------------------------------------------

    async def curate(self, curation: Curation) -> CurationOutcome:
        async with self._transaction():
            repeated = self.pool.curator.repeats(curation)
            outcome = self.pool.curator.curate(curation)
            if outcome is CurationOutcome.LATE and curation.action is CurationAction.RELABEL and not repeated:
                self._keep_late(reward_of_relabel(curation))
        await self._notify()
        return outcome

    async def audit(self, limit: int, trajectory_uid: str | None) -> list[AuditEntry]:
        """The last decisions, newest first."""
        self._check_open()
        return self.pool.curator.audit(limit, trajectory_uid)

    async def changes(self, cursor: Cursor, limit: int) -> ChangesPage:
        """Changes since the cursor; all trajectories if the shard has restarted since it gave the cursor."""
        async with self._transaction():
            reset = cursor.epoch != self._epoch or self.pool.state.change_log.misses(cursor.position)
            page = self.pool.view.page(0 if reset else cursor.position, limit)
        snapshots = [snapshot[:-1] for snapshot in page.snapshots]
        return ChangesPage(snapshots, Cursor(epoch=self._epoch, position=page.position), reset, page.more)

    async def series(self, seconds: float) -> SeriesChunk:
        async with self._transaction():
            return self.pool.state.series.chunk(seconds)

    async def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """The steps of each (trajectory_uid, prompt_uid), and how many each has."""
        self._check_open()
        return self.pool.view.read(uids)

    async def stats(self) -> PoolStats:
        async with self._transaction():
            stats = replace(self.pool.stats(), short_of_disk=int(self._disk_shortage() is not None))
        return stats if self._archive is None else replace(stats, archiving=self._archive.stats())

    async def quarantined(self) -> list[Step]:
        """The last quarantined steps, each with its reason."""
        self._check_open()
        return list(self.pool.state.quarantine)

    # -- what serves the policy ----------------------------------------------------------------------------------------

    async def set_policy_version(self, version: int) -> Serving:
        """Tokens that are sampled from now on come from these weights."""
        async with self._transaction():
            self.pool.policy_version = version
        async with self._serving_changed:
            self._serving_changed.notify_all()
        return self._serving

    async def change_engines(self, add: tuple[str, ...], remove: tuple[str, ...]) -> Serving:
        """Engines join and leave. Only the first shard of a pool is asked."""
        async with self._transaction():
            self.pool.state.change_engines(add, remove)
        async with self._serving_changed:
            self._serving_changed.notify_all()
        return self._serving

    async def serving(self, other_than: Serving | None = None, timeout: float = 0.0) -> Serving:
        """As it is now; with `other_than`, as soon as it differs from that, or after `timeout`."""
        async with self._serving_changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._serving_changed.wait_for(lambda: self._serving != other_than)
        self._check_open()
        return self._serving

    # -- private -------------------------------------------------------------------------------------------------------

    @property
    def _serving(self) -> Serving:
        return replace(self.pool.state.serving, epoch=self._epoch)

    def _answer(self, call: ProducerCall, shortage: str | None) -> ProducerAnswer | Exception:
        try:
            match call:
                case KnowsCall(trajectory_uid, prompt_uid, gateway):
                    self._attach(trajectory_uid, gateway)
                    return self.pool.ingest.knows(trajectory_uid, prompt_uid)
                case Registration() if shortage is not None:
                    return PoolUnavailable(shortage)
                case Registration():
                    self.pool.ingest.register(call)
                    self._attach(call.trajectory_uid, call.gateway)
                    return None
                case CompleteCall() if self._holders(call):
                    return FlushNeeded()
                case CompleteCall(trajectory_uid, prompt_uid, reward, failure):
                    return self.pool.ingest.complete(trajectory_uid, prompt_uid, reward, failure)
                case AbortCall(trajectory_uid, prompt_uid):
                    return self.pool.ingest.abort(trajectory_uid, prompt_uid)
                case _:
                    assert_never(call)
        except StepwellError as refusal:
            return refusal
        except Exception as failure:
            log.exception("shard %s failed to answer %s", self._name, call)
            return failure

    def _attach(self, trajectory_uid: str, gateway: str) -> None:
        """The gateway serves the trajectory."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if gateway:
            self._gateways.note(gateway)
            self.pool.state.set_living_gateways(self._gateways.living())
            if trajectory is not None and trajectory.gateways is not None:
                self.pool.state.set_gateways(trajectory, trajectory.gateways | {gateway})

    def _holders(self, call: CompleteCall) -> set[str]:
        """The other gateways that may hold steps of a trajectory that is to be completed."""
        trajectory = self.pool.state.trajectories.get(call.trajectory_uid)
        if not call.gateway or trajectory is None or trajectory.completed or not trajectory.is_at_home:
            return set()
        return self._gateways.holders(trajectory, but=call.gateway)

    def _check_room(self) -> None:
        shortage = self._disk_shortage()
        if shortage is not None:
            raise PoolUnavailable(shortage)

    def _disk_shortage(self) -> str | None:
        return None if self._floor is None else self._floor.shortage()

    def _ready_differs(self, request: BatchRequest, seen: ReadySummary) -> bool | None:
        """None if the same could be handed out."""
        self._begin()
        now = (self.pool.ready_ages(request), self.pool.nothing_after(request))
        return None if now == seen[1:] else True

    def _keep_late(self, reward: RewardGiven) -> bool:
        """Write the reward to the archive; False if there is none."""
        if self._archive is None:
            return False
        revision = self.pool.state.count_late_reward(reward.trajectory_uid)
        self._archive.add_late_reward(LateReward(**asdict(reward), revision=revision, at=self._clock()))
        return True

    async def _lease_out(
        self, take: Callable[[str, float], LeasedGroups | None], lease_uid: str, lease: float | None
    ) -> LeasedGroups | None:
        """What `take` finds, under a lease of that name and so many seconds. Without a lease it counts as trained."""
        leased = self._try_lease(take, lease_uid, lease)
        await self._commit()
        return leased

    def _try_lease(
        self, take: Callable[[str, float], LeasedGroups | None], lease_uid: str, lease: float | None
    ) -> LeasedGroups | None:
        """As `_lease_out`, before the commit."""
        self._begin()
        leased = take(lease_uid, self._pool_time() + (lease or 0.0))
        if leased is not None and lease is None:
            self.pool.leasing.ack(lease_uid)
        self._say_uniform()
        return leased if leased is None or lease is None else replace(leased, leases=((self._name, lease_uid),))

    def _say_uniform(self) -> None:
        """At the first, second, fourth, eighth group, and so on."""
        count = self.pool.state.uniform_groups
        if count >= self._next_uniform:
            self._next_uniform = 2 * count
            log.warning("shard %s: in %d groups all rollouts are the same; %s", self._name, count, UNIFORM)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        """One call: the clock advances before it, the journal commits after it, also if the call is refused."""
        self._begin()
        try:
            yield
        finally:
            await self._commit()

    def _begin(self) -> None:
        self._check_open()
        self.pool.advance(self._clock(), self._pool_time())

    def _pool_time(self) -> float:
        return self._pool_time_offset + self._monotonic()

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise PoolUnavailable(self._refusal)

    async def _commit(self) -> None:
        """Return when all changes so far are in the journal."""
        if self.pool.state.leases:
            self._lease_watch.start()
        if self.pool.state.has_unscored():
            self._has_unscored.set()
        else:
            self._has_unscored.clear()
        if self._journal is not None:
            await self._commits.committed()

    def _write_journal(self) -> None:
        if self._journal is not None:
            if self._archive is None:
                self._journal.forget_retired()
            self._journal.commit(self.pool.state.snapshot(), self._pool_time())
            if self._archive is not None:
                self._archive.poll()

    def _end(self, failure: Exception) -> None:
        """Answer nothing from memory any more. The process that follows continues from the journal."""
        self._refusal = f"shard {self._name} restarts from its journal: {failure}"
        log.critical("shard %s ends: its journal failed", self._name, exc_info=failure)
        self._on_journal_failure()

    async def _end_silent(self, lease_uids: Sequence[str]) -> bool:
        """Return the data of these leases. False if no lease is left."""
        if lease_uids:
            log.warning("shard %s: %d leases return, because their holders are silent", self._name, len(lease_uids))
            await self._change(partial(self.pool.leasing.end_silent, lease_uids))
        return bool(self.pool.state.leases)

    async def _change(self, operation: Callable[[], T]) -> T:
        """One call after which something may have become ready."""
        async with self._transaction():
            result = operation()
        await self._notify()
        return result

    async def _notify(self) -> None:
        """Wake all calls that wait for a change."""
        self._state += 1
        async with self._changed:
            self._changed.notify_all()

    async def _wait_until(self, attempt: Callable[[], T | None], timeout: float) -> T | None:
        """The result of `attempt` as soon as it is not None; None after `timeout`."""
        deadline = time.monotonic() + timeout
        async with self._changed:
            while (result := attempt()) is None and (left := deadline - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(min(left, self._recheck_interval)):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            return result
