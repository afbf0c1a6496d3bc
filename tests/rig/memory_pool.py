"""A pool in the test's own process: the real rules without Ray, and a switch that takes it away.

It stands still in time: leases end when a test says `pool.rules.advance(seconds)`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.errors import LeaseExpired, PoolUnavailable
from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.leasing import BatchRequest, HasLeases, LeasedGroups, ReadyGroups, Settlement
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.series import TimeSeries, merge_chunks
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import Changes, Cursor
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Exactness, Step
from stepwell.steps.step_filter import make_step_filter
from tests.builders import EasyPool

SHARD = "memory"


class MemoryPool:
    def __init__(self, **limits: Any) -> None:
        self.rules = EasyPool(Limits(**limits))
        self.away = False
        self.epoch = "first"
        """Another one makes watchers read anew, as a restart does."""
        self.loses_answers = 0
        """How many submissions still to take and then fail to answer for, as an actor does that dies too early."""
        self.messages: list[int] = []
        """How many steps each message had that was taken."""

    @property
    def policy_version(self) -> int:
        return self.rules.policy_version

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> bool:
        await self.check()
        return self.rules.knows(trajectory_uid, prompt_uid)

    async def register_trajectory(self, wanted: Registration) -> None:
        await self.check()
        self.rules.register(wanted)

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        await self.check()
        self.messages.append(len(steps))
        verdicts = self.rules.submit(steps, channel=channel, group_size=group_size)
        self._answer()
        return verdicts

    async def submit_groups(self, steps: Sequence[Step], registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        return await self.submit_columns(pack(steps), registrations)

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        await self.check()
        self.messages.append(len(columns))
        verdicts = self.rules.ingest.submit_groups(columns, registrations)
        self._answer()
        return verdicts

    async def fill_batch(
        self,
        trajectories: int,
        *,
        channel: str,
        shares: Mapping[str, float],
        lease: float,
        min_exactness: str = "retokenized",
        untrainable: bool = True,
    ) -> LeasedGroups | None:
        await self.check()
        step_filter = make_step_filter(min_exactness, untrainable)
        leased = self.rules.fill(trajectories, channel, shares=shares, seconds=lease, step_filter=step_filter)
        return None if leased is None else replace(leased[1], leases=((SHARD, leased[0]),))

    async def ack(self, leased: HasLeases) -> None:
        await self.check()
        if Settlement.EXPIRED in [self.rules.leasing.ack(uid) for _, uid in leased.leases]:
            raise LeaseExpired("the lease was over before the batch was acknowledged; ask for a longer one")

    async def nack(self, leased: HasLeases) -> None:
        await self.check()
        for _, uid in leased.leases:
            self.rules.leasing.nack(uid)

    async def backlog(self, channel: str) -> ReadyGroups:
        await self.check()
        return self.rules.backlog(channel)

    async def clear(self, channel: str) -> int:
        await self.check()
        return self.rules.clear(channel)

    async def complete_trajectory(self, trajectory_uid: str, prompt_uid: str, reward: float | None) -> EndResult:
        await self.check()
        return self.rules.complete(trajectory_uid, prompt_uid, reward)

    async def give_reward(self, reward: RewardGiven) -> bool:
        await self.check()
        return self.rules.ingest.reward(reward)

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        await self.check()
        return self.rules.abort(trajectory_uid, prompt_uid)

    async def pacing(self, channel: str) -> Pacing:
        await self.check()
        return self.rules.pacing(channel)

    async def check(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise PoolUnavailable("the pool is away")

    async def follow(self) -> None:
        await asyncio.Event().wait()

    # -- as a watcher sees it ------------------------------------------------------------------------------------------

    async def stats(self) -> PoolStats:
        await self.check()
        return self.rules.stats()

    async def series(self, *, seconds: float) -> TimeSeries:
        await self.check()
        return merge_chunks([self.rules.view.series(seconds)])

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        await self.check()
        cursor = cursors.get(SHARD, Cursor())
        anew = cursor.epoch != self.epoch or self.rules.view.misses(cursor.position)
        page = self.rules.view.page(0 if anew else cursor.position, limit)
        return Changes(
            snapshots=[snapshot._replace(shard=SHARD) for snapshot in page.snapshots],
            cursors={SHARD: Cursor(epoch=self.epoch, position=page.position)},
            reset_shards=[SHARD] if anew else [],
            more=page.more,
        )

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        await self.check()
        return self.rules.view.read(uids)[0]

    async def curate(self, curation: Curation) -> CurationOutcome:
        await self.check()
        return self.rules.curator.curate(curation)

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        await self.check()
        return self.rules.curator.audit(limit, trajectory_uid)

    def _answer(self) -> None:
        if self.loses_answers:
            self.loses_answers -= 1
            raise PoolUnavailable("the answer was lost")

    def taken(self, channel: str = "train") -> list[Step]:
        """The steps of the oldest ready group, those that a trainer would leave out included."""
        groups = self.rules.take(1, channel, untrainable=True, min_exactness=Exactness.RETOKENIZED)
        assert groups is not None, self.rules.waiting_for(BatchRequest(count=1, channel=channel))
        return groups[0]
