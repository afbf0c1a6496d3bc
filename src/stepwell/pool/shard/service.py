"""One shard of the DataPool as a service: the pool's rules with a clock, files and waiting calls. It holds no rule.

- A plain class: Ray is added in actor.py.
- A call may be repeated after a lost answer. What it changes is in the journal before it answers.
- Steps travel packed, in both directions.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from stepwell.pool.api.leasing import Settlement, decision_of
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.policy import Serving
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.transport import News, Seen
from stepwell.pool.api.watching import ChangesPage, Cursor
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.shard import Shard, ShardTransactions
from stepwell.pool.slices.all import SLICES
from stepwell.pool.state.slice import Slice
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject, Step

log = logging.getLogger("stepwell.pool")

GC_THRESHOLD = (100_000, 50, 100)
"""A pool holds many objects without cycles; the search for cycles among them is useless work."""


class ShardService(OperationCalls, ConsumerCalls):
    """Every call to a shard. Clients get these methods from `ShardSet.at`."""

    def __init__(
        self,
        plan: PoolPlan,
        name: str,
        *,
        slices: Sequence[type[Slice]] = SLICES,
        limits: Limits | None = None,
        journal: ShardJournal | None = None,
        archive: ParquetArchive | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        recheck_interval: float = 1.0,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        refusal: str | None = None,
        on_journal_failure: Callable[[], None] = lambda: None,
        ask_decision: Callable[[str, str], Awaitable[Settlement]] | None = None,
    ) -> None:
        """`slices` are the features that have state in this shard. `limits` are those of this shard, where they are
        not the plan's.

        The pool is restored from the journal. `clock` gives wall-clock seconds. Leases and deadlines count
        `monotonic` ones, and go on where they stood when the shard ended.

        With a refusal, every call is answered with it: the journal cannot be used. `on_journal_failure` ends the
        process, so that another one can start.

        While somebody waits for news, it is looked for every `recheck_interval` seconds, because leases and deadlines
        end by themselves. A lease whose holder sent no heartbeat for `heartbeat_timeout` seconds returns.

        `ask_decision` asks another shard by its name for its decision over a batch of several shards.
        """
        transactions = ShardTransactions(
            plan,
            name,
            slices=slices,
            limits=limits,
            journal=journal,
            archive=archive,
            clock=clock,
            monotonic=monotonic,
            recheck_interval=recheck_interval,
            heartbeat_timeout=heartbeat_timeout,
            refusal=refusal,
            on_journal_failure=on_journal_failure,
            ask_decision=ask_decision,
        )
        super().__init__(Shard(transactions))
        for part in self.pool.state.slices:
            part.attach(self.shard)
        self._archive = archive

    async def plan(self) -> PoolPlan:
        self._transactions.check_open()
        return self._transactions.plan

    async def adopt_plan(self, plan: PoolPlan) -> PoolPlan:
        """Follow a newer plan. Returns the plan that the shard follows."""
        async with self._transactions.transaction():
            self._transactions.adopt(plan)
        return self._transactions.plan

    async def shared_rows(self) -> dict[str, JsonObject]:
        """What slices share with other shards when the number of shards changes, by the name of the slice."""
        self._transactions.check_open()
        return {part.name: dict(rows) for part in self.pool.state.slices if (rows := part.shared())}

    async def merge_rows(self, shared: Mapping[str, JsonObject]) -> None:
        """Take over what another shard shares."""
        async with self._transactions.transaction():
            for part in self.pool.state.slices:
                if part.name in shared:
                    part.merge(shared[part.name])

    async def undrained(self) -> int:
        """What keeps a change of the shards from its end: groups that belong to other shards by now, leases on which a
        shard that is to go decides, and, if this one is to go, what is on its way to the archive."""
        plan = self._transactions.plan
        leaves = self.pool.state.shard >= plan.shards
        async with self._transactions.transaction():
            if leaves:
                self.pool.state.retire_history()
        archives = leaves and self._archive is not None and self._archive.has_work
        decisions = filter(None, map(decision_of, self.pool.state.leases))
        undecided = sum(coordinator in plan.shard_names()[plan.shards :] for coordinator, _ in decisions)
        return self.pool.ownership.misplaced() + undecided + archives

    async def tombstones(self) -> dict[str, float]:
        """The digests of the subjects of which nothing is taken, each with the time at which that was asked for."""
        self._transactions.check_open()
        found = self.pool.state.tombstones.subjects.values()
        return {tombstone.subject: tombstone.at for tombstone in found if not tombstone.is_of_age}

    async def adopt_tombstones(self, subjects: Mapping[str, float]) -> None:
        """A shard that joins the pool takes nothing of them either."""
        async with self._transactions.transaction():
            for subject, at in subjects.items():
                self.pool.state.refuse_subject(subject, at)

    async def wait_news(self, asker: str, seen: Seen, timeout: float) -> News:
        """As soon as one of the topics is not as it was seen; nothing after `timeout`. A later question of the same
        asker ends the earlier one."""
        return await self.shard.news.wait(asker, seen, timeout)

    # -- watchers --------------------------------------------------------------------------------------------------

    async def changes(self, cursor: Cursor, limit: int) -> ChangesPage:
        """Changes since the cursor; all trajectories if the shard has restarted since it gave the cursor."""
        async with self._transactions.transaction():
            reset = cursor.epoch != self.shard.watch_epoch or self.pool.state.change_log.misses(cursor.position)
            page = self.pool.view.page(0 if reset else cursor.position, limit)
        snapshots = [snapshot[:-1] for snapshot in page.snapshots]
        return ChangesPage(snapshots, Cursor(epoch=self.shard.watch_epoch, position=page.position), reset, page.more)

    async def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """The steps of each (trajectory_uid, prompt_uid), and how many each has."""
        self._transactions.check_open()
        return self.pool.view.read(uids)

    async def stats(self) -> PoolStats:
        async with self._transactions.transaction():
            short_of_disk = int(self._transactions.disk_shortage() is not None)
            stats = replace(self.pool.stats(), short_of_disk=short_of_disk)
            for add in self.shard.on_stats:
                stats = add(stats)
        return stats if self._archive is None else replace(stats, archiving=self._archive.stats())

    async def quarantined(self) -> list[Step]:
        """The last quarantined steps, each with its reason."""
        self._transactions.check_open()
        return list(self.pool.state.quarantine)

    # -- what serves the policy ----------------------------------------------------------------------------------------

    async def set_policy_version(self, version: int, withdrawn: tuple[int, ...] | None = None) -> Serving:
        """Tokens that are sampled from now on come from these weights. What the withdrawn versions said is not trained;
        None leaves them as they are."""
        async with self._transactions.transaction():
            self.pool.state.set_policy_version(version, withdrawn)
        return self.shard.serving

    async def set_adapter(self, channel: str, adapter: str, version: int) -> Serving:
        """The channel's calls are answered by this adapter from now on, and its steps age by this version."""
        async with self._transactions.transaction():
            self.pool.state.set_adapter(channel, adapter, version)
        return self.shard.serving

    async def serving(self) -> Serving:
        """As it is now."""
        self._transactions.check_open()
        return self.shard.serving
