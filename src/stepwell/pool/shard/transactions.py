"""How a call changes the pool of a shard: the clock before it and the journal after it.

- What a call changes is in the journal before it answers.
- If a commit fails, the state in memory is ahead of the journal: no call is answered any more, and the process ends.
- With too little free space, no new data is taken; leases, rewards and completions can still be written.
- One commit for all calls that are under way at the same time: a commit that waits for the disk stays cheap.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.plan import FIRST_REVISION, LayoutDiffers, Limits, PoolPlan
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.state.slice import Slice

log = logging.getLogger("stepwell.pool")

MIB = 2**20


class ShardTransactions:
    def __init__(
        self,
        plan: PoolPlan,
        name: str,
        *,
        slices: Sequence[type[Slice]],
        limits: Limits | None,
        journal: ShardJournal | None,
        archive: ParquetArchive | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        recheck_interval: float,
        heartbeat_timeout: float,
        refusal: str | None,
        on_journal_failure: Callable[[], None],
        ask_decision: Callable[[str, str], Awaitable[Settlement]] | None,
    ) -> None:
        """The arguments are those of ShardService."""
        self.name = name
        self.ask_decision = ask_decision
        self.plan = plan if plan.revision else replace(plan, revision=FIRST_REVISION)
        """With the present layout of the shards."""
        self.archive = archive
        self.journal = journal
        self.clock = clock
        self.monotonic = monotonic
        self.recheck_interval = recheck_interval
        self.heartbeat_timeout = heartbeat_timeout
        self.pool = Pool(limits or plan.limits, journal, slices)
        self.pool.state.tombstones.key = plan.uid.encode()
        self.before_commit: list[Callable[[], None]] = []
        """Called whenever the pool may have changed."""
        self.after_commit: list[Callable[[], object]] = []
        """Called when what has changed is in the journal."""
        if journal is not None:
            log.info("shard %s restored %s", name, restore_pool(self.pool, journal))
        self._restore_layouts()
        stopped_at = None if journal is None else journal.pool_time()
        self._pool_time_offset = (clock() if stopped_at is None else stopped_at) - monotonic()
        self.pool.state.restart_sessions(self.pool_time())
        self._refusal = refusal
        self._on_journal_failure = on_journal_failure
        self._commits = GroupCommit(self._write_journal, self._end)
        self._floor: DiskFloor | None = None
        if journal is not None:
            store = journal.store
            self._floor = DiskFloor(plan.min_free_bytes, store.free_bytes, shard=name, place=store.name)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """One call: the clock advances before it, the journal commits after it, also if the call is refused."""
        self.begin()
        try:
            yield
        finally:
            await self.commit()

    def begin(self) -> None:
        self.check_open()
        self.pool.advance(self.clock(), self.pool_time())

    async def commit(self) -> None:
        """Return when all changes so far are in the journal."""
        for prepare in self.before_commit:
            prepare()
        if self.journal is not None:
            await self._commits.committed()
        else:
            self.pool.state.pack_at_rest()
        for follow in self.after_commit:
            follow()

    def pool_time(self) -> float:
        return self._pool_time_offset + self.monotonic()

    def adopt(self, plan: PoolPlan) -> None:
        """Take over the layout of a newer plan; an older one changes nothing."""
        if plan.revision > self.plan.revision:
            self.plan = replace(self.plan.with_layouts(plan.layouts), nodes=plan.nodes)
            self._note_layouts()

    def check_routed(self, revision: int | None) -> None:
        """LayoutDiffers if a call was routed by another layout than this shard knows."""
        self.check_open()
        if revision is None and self.plan.revision > FIRST_REVISION:
            raise PoolUnavailable(
                "the number of shards has changed, and the release of this process cannot follow: bring it to the "
                "release of the pool; its steps wait meanwhile"
            )
        if revision not in (None, self.plan.revision):
            raise LayoutDiffers(f"shard {self.name} follows {self.plan.routing} of the plan, not revision {revision}")

    def check_open(self) -> None:
        if self._refusal is not None:
            raise PoolUnavailable(self._refusal)

    def check_room(self) -> None:
        shortage = self.disk_shortage()
        if shortage is not None:
            raise PoolUnavailable(shortage)

    def disk_shortage(self) -> str | None:
        return None if self._floor is None else self._floor.shortage()

    def _restore_layouts(self) -> None:
        """The journal has a newer layout than the plan if that changed after the shard was created."""
        if self.pool.state.layouts[-1].revision > self.plan.revision:
            self.plan = self.plan.with_layouts(self.pool.state.layouts)
        self._note_layouts()

    def _note_layouts(self) -> None:
        self.pool.state.set_layouts(self.plan.layouts, self.plan.index_of(self.name))

    def _write_journal(self) -> None:
        if self.journal is not None:
            if self.archive is None:
                self.journal.remove_retired()
            self.journal.commit(self.pool.state.snapshot(), self.pool_time())
            self.pool.state.pack_at_rest()
            if self.archive is not None:
                self.archive.poll()

    def _end(self, failure: Exception) -> None:
        """Answer nothing from memory any more. The process that follows continues from the journal."""
        self._refusal = f"shard {self.name} restarts from its journal: {failure}"
        log.critical("shard %s ends: its journal failed", self.name, exc_info=failure)
        self._on_journal_failure()


class DiskFloor:
    def __init__(self, min_free: int, free_bytes: Callable[[], float], *, shard: str, place: str) -> None:
        """`place` is what is nearly full."""
        self._min_free = min_free
        self._free_bytes = free_bytes
        self._shard = shard
        self._place = place
        self._said = False

    def shortage(self) -> str | None:
        """Why no new data is taken, and what to do; None if there is room. The log has it once."""
        free = self._free_bytes()
        if free >= self._min_free:
            self._said = False
            return None
        text = (
            f"shard {self._shard} takes no new data: the disk of {self._place} has {free / MIB:.1f} MiB free, and "
            f"--min-free-bytes is {self._min_free / MIB:g} MiB. Free some space there, or let trainers take what the "
            "pool holds; steps wait in the gateways meanwhile"
        )
        if not self._said:
            self._said = True
            log.error("%s", text)
        return text


class GroupCommit:
    def __init__(self, commit: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        """After a failure it is not known what the journal has: nothing is committed any more."""
        self._commit = commit
        self._on_failure = on_failure
        self._waiting: list[asyncio.Future[None]] = []
        self._failure: Exception | None = None

    async def committed(self) -> None:
        """Return when all changes so far are committed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._commit_all)  # after all calls that can run now
        self._waiting.append(done)
        await done

    def _commit_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._failure is None:
            try:
                self._commit()
            except Exception as failure:  # noqa: BLE001 - whatever it is, memory and journal differ from now on
                self._failure = failure
                self._on_failure(failure)
        for done in waiting:
            if not done.done():  # a call that was cancelled
                if self._failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(PoolUnavailable(f"the journal failed: {self._failure}"))
