"""A shard of the DataPool: a Ray shell around the pool's rules. It holds the actor, the clock, the journal and the
waiting, and no rule.

Every method may be called again after a lost answer. Steps travel packed, both ways. What a method changed is in the
journal before the method answers.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from stepwell.errors import FetchTimeout, StepwellError
from stepwell.pool.api.curation import AuditEntry, Curation, CurationAction, CurationOutcome
from stepwell.pool.api.leasing import BatchRequest, GroupOffer, LeasedGroups, ReadyGroups, ReadySummary, Settlement
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import TRAIN, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.scoring import Judgement, JudgementOutcome
from stepwell.pool.api.series import SeriesChunk
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import ChangesPage, Cursor
from stepwell.pool.client.batch import Batch, batch_of
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.journal import SqliteJournal
from stepwell.pool.shard.late_rewards import as_reward, late
from stepwell.pool.shard.recovery import restore
from stepwell.steps.columns import Columns
from stepwell.steps.step import Step
from stepwell.steps.step_filter import StepFilter

log = logging.getLogger("stepwell.pool")

T = TypeVar("T")

GC_THRESHOLD = (100_000, 50, 100)
"""What a pool holds is many objects without cycles: looking for cycles among them is work for nothing."""
LOOK_AGAIN = 1.0
"""Seconds after which a waiting call looks again though nothing was told: leases and deadlines end by themselves."""


class ShardService:
    def __init__(self, plan: PoolPlan, name: str) -> None:
        gc.set_threshold(*GC_THRESHOLD)
        self._plan = plan
        self._name = name
        self._journal: SqliteJournal | None = None
        self._archive: ParquetArchive | None = None
        if plan.journal is not None:
            path = Path(plan.journal) / f"{name}.sqlite"
            self._journal = SqliteJournal(path, closed_kept=plan.limits.closed_kept)
            self._archive = ParquetArchive(plan.archive, name, self._journal) if plan.archive else None
        self._pool = Pool(plan.limits, self._journal)
        if self._journal is not None:
            log.info("shard %s restored %s", name, restore(self._pool, self._journal))
        self._epoch = uuid4().hex
        self._changes = 0
        self._changed = asyncio.Condition()
        self._version_changed = asyncio.Condition()
        self._has_unscored = asyncio.Event()

    async def plan(self) -> PoolPlan:
        return self._plan

    # -- producers -----------------------------------------------------------------------------------------------------

    async def answer(self, questions: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """What the intake says to each, or the error by which it refuses."""
        with self._changing():
            answers = [self._answer(method, args) for method, args in questions]
        if any(method == "complete" for method, _ in questions):
            await self._tell()
        return answers

    async def submit_steps(
        self, steps: Columns, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        with self._changing():
            verdicts = self._pool.ingest.submit(steps, channel=channel, group_size=group_size)
        await self._tell()
        return verdicts

    async def submit_groups(self, steps: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        with self._changing():
            verdicts = self._pool.ingest.submit_groups(steps, registrations)
        await self._tell()
        return verdicts

    async def give_reward(self, reward: RewardGiven) -> bool:
        """Whether it is kept: to train with, or, once its trajectory was handed out, in the archive if there is one."""
        with self._changing():
            kept = self._pool.ingest.reward(reward)
            if not kept and not self._pool.curator.holds_reward_of(reward.trajectory_uid):
                kept = self._keep_late(reward)
        await self._tell()
        return kept

    async def pacing(self, channel: str = TRAIN) -> Pacing:
        with self._changing():
            return self._pool.pacing(channel)

    # -- consumers -----------------------------------------------------------------------------------------------------

    async def fetch_batch(
        self, wanted: BatchRequest, timeout: float = 60.0, lease: float | None = None, lease_uid: str = ""
    ) -> Batch:
        """What is wanted, once it is ready; FetchTimeout says what was still missing.

        Under a lease it comes back unless it is acknowledged in so many seconds; without, it is the caller's for good.
        """
        batch = await self._wait_for(lambda: self._take(wanted, lease_uid, lease), timeout)
        if batch is None:
            raise FetchTimeout(f"waited {timeout:g} s for {self._pool.waiting_for(wanted)}")
        return batch

    async def take(self, wanted: BatchRequest, lease: float, lease_uid: str) -> Batch | None:
        """What is wanted if it is ready now."""
        return self._take(wanted, lease_uid, lease)

    async def ack(self, lease_uid: str) -> Settlement:
        with self._changing():
            return self._pool.leasing.ack(lease_uid)

    async def nack(self, lease_uid: str) -> Settlement:
        with self._changing():
            settlement = self._pool.leasing.nack(lease_uid)
        await self._tell()
        return settlement

    async def peek(self, wanted: BatchRequest) -> ReadySummary:
        with self._changing():
            return ReadySummary(self._changes, self._pool.ready_ages(wanted), self._pool.nothing_after(wanted))

    async def wait_change(self, seen: int, timeout: float) -> None:
        """Until something may have become ready since state `seen`."""
        await self._wait_for(lambda: self._changes != seen or None, timeout)

    async def waiting_for(self, wanted: BatchRequest) -> str:
        return self._pool.waiting_for(wanted)

    async def offers(self, channel: str, trajectories: int, step_filter: StepFilter) -> list[GroupOffer]:
        """What could become part of a batch of so many trajectories."""
        with self._changing():
            return self._pool.leasing.offers(channel, trajectories, step_filter, self._name)

    async def take_offers(
        self, channel: str, offers: Sequence[GroupOffer], lease: float, lease_uid: str, step_filter: StepFilter
    ) -> LeasedGroups | None:
        """None if one of them is gone by now."""
        with self._changing():
            taken = self._pool.leasing.take_offers(channel, offers, step_filter, lease_uid, time.time() + lease)
        return None if taken is None else replace(taken, leases=((self._name, lease_uid),))

    async def fill(
        self,
        channel: str,
        trajectories: int,
        shares: Mapping[str, float],
        lease: float,
        lease_uid: str,
        step_filter: StepFilter,
    ) -> LeasedGroups | None:
        """A batch of exactly so many trajectories, from this shard alone; None if there is none now."""
        with self._changing():
            expires_at = time.time() + lease
            taken = self._pool.leasing.fill(channel, trajectories, shares, step_filter, lease_uid, expires_at)
        return None if taken is None else replace(taken, leases=((self._name, lease_uid),))

    async def put_back(self, lease_uid: str) -> Settlement:
        """What was taken and no one saw."""
        with self._changing():
            settlement = self._pool.leasing.nack(lease_uid, attempted=False)
        await self._tell()
        return settlement

    async def backlog(self, channel: str) -> ReadyGroups:
        with self._changing():
            return self._pool.backlog(channel)

    async def clear(self, channel: str) -> int:
        """Drop all that is not under lease; gives how many groups that was."""
        with self._changing():
            return self._pool.clear(channel)

    # -- reward workers ------------------------------------------------------------------------------------------------

    async def wait_unscored(self, timeout: float) -> bool:
        """Whether there is something to score, as soon as there is."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changing():
                pass
            left = min(deadline - time.monotonic(), LOOK_AGAIN)
            if self._has_unscored.is_set() or left <= 0:
                return self._has_unscored.is_set()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._has_unscored.wait()

    async def take_unscored(self, count: int, lease: float, ticket: str) -> Columns | None:
        """All steps of up to `count` trajectories that lack a reward; those not judged in `lease` seconds come back."""
        with self._changing():
            return self._pool.rewards_due.take(count, ticket, time.time() + lease)

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        """Whether each counted."""
        with self._changing():
            counted = self._pool.rewards_due.settle(judgements)
        failed = [judgement for judgement in judgements if judgement.outcome is not JudgementOutcome.SCORE]
        if failed:
            first = failed[0]
            text = "%d of %d trajectories could not be scored now; the first, %s, by %s: %s: %s"
            told = (len(failed), len(judgements), first.trajectory_uid, first.source, first.outcome, first.why)
            log.warning(text, *told)
        await self._tell()
        return counted

    # -- people --------------------------------------------------------------------------------------------------------

    async def curate(self, curation: Curation) -> CurationOutcome:
        with self._changing():
            repeated = self._pool.curator.repeats(curation)
            outcome = self._pool.curator.curate(curation)
            if outcome is CurationOutcome.LATE and curation.action is CurationAction.RELABEL and not repeated:
                self._keep_late(as_reward(curation))
        await self._tell()
        return outcome

    async def audit(self, limit: int, trajectory_uid: str | None) -> list[AuditEntry]:
        """The last decisions, newest first."""
        return self._pool.curator.audit(limit, trajectory_uid)

    async def changes(self, cursor: Cursor, limit: int) -> ChangesPage:
        """What has changed since the cursor; all there is if it was given by a shard that has restarted since."""
        with self._changing():
            anew = cursor.epoch != self._epoch or self._pool.view.misses(cursor.position)
            page = self._pool.view.page(0 if anew else cursor.position, limit)
        plain = [snapshot[:-1] for snapshot in page.snapshots]
        return ChangesPage(plain, Cursor(epoch=self._epoch, position=page.position), anew, page.more)

    async def series(self, seconds: float) -> SeriesChunk:
        with self._changing():
            return self._pool.view.series(seconds)

    async def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """The steps of those (trajectory_uid, prompt_uid), and how many each has."""
        return self._pool.view.read(uids)

    # -- the policy, and sight -----------------------------------------------------------------------------------------

    async def set_policy_version(self, version: int) -> None:
        """Tell every gateway that tokens sampled from now on come from these weights."""
        with self._changing():
            self._pool.policy_version = version
        async with self._version_changed:
            self._version_changed.notify_all()

    async def policy_version(self, other_than: int | None = None, timeout: float = 0.0) -> int:
        """The version now; with `other_than`, as soon as it differs from that, or after `timeout`."""
        async with self._version_changed:
            try:
                async with asyncio.timeout(timeout):
                    await self._version_changed.wait_for(lambda: self._pool.policy_version != other_than)
            except TimeoutError:
                pass
        return self._pool.policy_version

    async def stats(self) -> PoolStats:
        with self._changing():
            return self._pool.stats()

    async def quarantined(self) -> list[Step]:
        """The last steps that were quarantined, each with its reason."""
        return list(self._pool.ingest.quarantine)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _answer(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self._pool.ingest, method)(*args)
        except StepwellError as refusal:
            return refusal
        except Exception as failure:
            log.exception("shard %s failed to %s", self._name, method)
            return failure

    def _keep_late(self, reward: RewardGiven) -> bool:
        """Beside the archive's groups, if there is an archive."""
        if self._archive is None:
            return False
        revision = self._pool.state.count_late_reward(reward.trajectory_uid)
        self._archive.add_late_reward(late(reward, revision, time.time()))
        return True

    def _take(self, wanted: BatchRequest, lease_uid: str, lease: float | None) -> Batch | None:
        with self._changing():
            uid = lease_uid or uuid4().hex
            taken = self._pool.leasing.take(wanted, uid, time.time() + (lease or 0.0))
            if taken is not None and lease is None:
                self._pool.leasing.ack(uid)
        return None if taken is None else batch_of(taken, () if lease is None else ((self._name, uid),))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One message: the clock before, the journal after, whether it was refused or not."""
        self._pool.advance(time.time())
        try:
            yield
        finally:
            if self._journal is not None:
                if self._archive is None:
                    self._journal.forget_retired()
                self._journal.commit(self._pool.state.snapshot())
                if self._archive is not None:
                    self._archive.keep_up()
            if self._pool.rewards_due.has_work():
                self._has_unscored.set()
            else:
                self._has_unscored.clear()

    async def _tell(self) -> None:
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, attempt: Callable[[], T | None], timeout: float) -> T | None:
        """What `attempt` gives as soon as it gives something; None after `timeout`."""
        deadline = time.monotonic() + timeout
        async with self._changed:
            while (found := attempt()) is None and (left := deadline - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(min(left, LOOK_AGAIN)):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            return found
