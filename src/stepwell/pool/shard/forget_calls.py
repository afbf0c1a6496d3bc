"""The calls by which a shard forgets a subject, and what is too old."""

from collections.abc import Sequence
from uuid import uuid4

from stepwell.pool.api.forgetting import ForgottenSubject, Overdue, ShardReceipt
from stepwell.pool.api.producing import SCRUB_SPOOL
from stepwell.pool.shard.forgetting import Forgetting
from stepwell.pool.shard.operation_calls import OperationCalls
from stepwell.pool.shard.retention_watch import RetentionWatch
from stepwell.pool.shard.shard import Shard


class ForgetCalls(OperationCalls):
    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self.forgetting = Forgetting(shard.transactions, shard.gateways)
        self._renew_watch_epoch()
        self.forgetting.on_removed = self._renew_watch_epoch
        self.retention_watch = RetentionWatch(self._remove_overdue)
        shard.transactions.before_commit.extend((self.forgetting.resume, self._watch_retention))

    async def forget(self, subject: str, also: Sequence[str] = ()) -> ShardReceipt:
        """Remove everything of a subject, for good. Returns when it is done; asked again, it says what it did."""
        self._transactions.check_open()
        return await self.forgetting.forget(subject, also)

    async def forget_overdue(self, seconds: float | None) -> ShardReceipt:
        """Remove everything that is older than that, and what is older than its own retention. Returns when it is done.

        `seconds` may be more than the pool keeps data, or None."""
        self._transactions.check_open()
        return await self.forgetting.forget_overdue(seconds, by_clock=True)

    async def overdue(self) -> Overdue:
        """What the retention keeps, though it is too old by the wall clock. What it need not keep is removed before."""
        self._transactions.check_open()
        await self._remove_overdue()
        return self.forgetting.overdue

    async def forget_kept_back(self) -> ShardReceipt:
        """Remove that too: a person says that the wall clock is right, and that the pool was off."""
        async with self._transactions.transaction():
            self.pool.state.tombstones.running.trust_clock()
        return await self.forgetting.forget_overdue(self.pool.state.limits.retention, by_clock=True)

    async def forgotten_subjects(self) -> list[ForgottenSubject]:
        self._transactions.check_open()
        return self.forgetting.subjects()

    async def adopt_forgotten(self, subjects: Sequence[ForgottenSubject]) -> None:
        """A shard that joins the pool takes nothing of them either."""
        self._transactions.check_open()
        await self.forgetting.adopt(subjects)

    async def _remove_overdue(self) -> None:
        await self.forgetting.forget_overdue(self.pool.state.limits.retention, by_clock=False)

    def _watch_retention(self) -> None:
        if self.pool.state.limits.retention is not None or self.pool.state.has_retention:
            self.retention_watch.start()

    def _renew_watch_epoch(self) -> None:
        """Watchers that know another one read everything again, and lose what is no longer there."""
        self._watch_epoch = uuid4().hex

    async def flushed(self, gateway: str, trajectory_uids: Sequence[str]) -> None:
        if SCRUB_SPOOL in trajectory_uids:
            self.forgetting.scrubbed.add(gateway)
        await super().flushed(gateway, trajectory_uids)
