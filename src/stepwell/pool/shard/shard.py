"""A shard: its pool, with a clock, a journal and an archive, and what it tells those who wait and its gateways.

- Every call is a transaction: the clock advances, the call runs, the journal commits, and those who wait for news are
  woken. What a call changes is in the journal before it answers.
- If a commit fails, the state in memory is ahead of the journal: no call is answered any more, and the process ends.
- With too little free space, no new data is taken; leases, rewards and completions can still be written.
- News (see pool/api/transport.py) is looked for after each commit, and once a second while somebody waits, because
  leases and deadlines end by themselves. An asker has one question at a time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import ReadyCounts, Settlement
from stepwell.pool.api.plan import FIRST_REVISION, LayoutDiffers, Limits, PoolPlan
from stepwell.pool.api.policy import Serving
from stepwell.pool.api.producing import CallBegun, FlushNeeded, RewardGiven
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.transport import (
    CHANGES,
    PLAN,
    SERVING,
    SYNC,
    UNSCORED,
    News,
    NewsItem,
    Revision,
    Seen,
    flush_topic,
    ready_topic,
)
from stepwell.pool.rules.leasing import LeaseHeartbeats
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.archive_files import LateReward
from stepwell.pool.shard.gateway_roster import HEARTBEAT, EngineReports, GatewayRoster
from stepwell.pool.shard.journal import DiskFloor, GroupCommit, ShardJournal
from stepwell.pool.shard.recovery import restore_pool
from stepwell.pool.state.slice import Slice

log = logging.getLogger("stepwell.pool")

HEARTBEAT_TIMEOUT = 10.0
"""Seconds after its last heartbeat that a trainer is taken for dead."""


class Watch:
    """Work that is repeated as long as there is some."""

    def __init__(self, tick: float, work: Callable[[float], Awaitable[bool]]) -> None:
        """`work` is called after every `tick` seconds with the time that has passed, and says whether more is left. A
        time in which this process was stopped counts as little more than a tick."""
        self._tick = tick
        self._work = work
        self.running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Doing it again is harmless."""
        if self.running is None or self.running.done():
            self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        is_left = True
        while is_left:
            began = time.monotonic()
            await asyncio.sleep(self._tick)
            try:
                is_left = await self._work(min(time.monotonic() - began, 2 * self._tick))
            except PoolUnavailable:  # the shard answers nothing any more
                return


class NewsBoard:
    """The topics of one shard, and the questions that wait for them."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._number = 0
        self._items: dict[str, NewsItem] = {}
        self._questions: dict[str, asyncio.Event] = {}
        """By asker."""
        self._by_topic: dict[str, set[asyncio.Event]] = {}

    @property
    def is_asked(self) -> bool:
        return bool(self._questions)

    def waits(self, topic: str) -> bool:
        """A question for the topic waits."""
        return topic in self._by_topic

    def item(self, topic: str) -> NewsItem:
        return self._items.get(topic) or NewsItem(Revision(self._epoch))

    def post(self, topic: str, value: Any = None) -> None:
        """There is something new."""
        self._number += 1
        self._items[topic] = NewsItem(Revision(self._epoch, self._number), value)
        for question in self._by_topic.get(topic, ()):
            question.set()

    def remove(self, topic: str) -> None:
        """Nobody asks for it any more."""
        self._items.pop(topic, None)

    def end_questions(self) -> None:
        for question in self._questions.values():
            question.set()

    async def wait(self, asker: str, seen: Seen, timeout: float) -> News:
        if (earlier := self._questions.get(asker)) is not None:
            earlier.set()
        self._questions[asker] = question = asyncio.Event()
        for topic in seen:
            self._by_topic.setdefault(topic, set()).add(question)
        try:
            if not (news := self._since(seen)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await question.wait()
                news = self._since(seen)
            return news
        finally:
            if self._questions.get(asker) is question:
                del self._questions[asker]
            for topic in seen:
                self._by_topic[topic].discard(question)
                if not self._by_topic[topic]:
                    del self._by_topic[topic]

    def _since(self, seen: Seen) -> News:
        items = {topic: self.item(topic) for topic in seen}
        return {topic: item for topic, item in items.items() if item.revision != seen[topic]}


class Shard:
    """What an operation finds where it runs.

    `slices` are the features that have state in this shard. `limits` are those of this shard, where they are not the
    plan's.

    The pool is restored from the journal. `clock` gives wall-clock seconds. Leases and deadlines count `monotonic`
    ones, and go on where they stood when the shard ended.

    With a refusal, every call is answered with it: the journal cannot be used. `on_journal_failure` ends the process,
    so that another one can start.

    While somebody waits for news, it is looked for every `recheck_interval` seconds, because leases and deadlines end
    by themselves. A lease whose holder sent no heartbeat for `heartbeat_timeout` seconds returns.

    `ask_decision` asks another shard by its name for its decision over a batch of several shards.
    """

    def __init__(
        self,
        plan: PoolPlan,
        name: str,
        *,
        slices: Sequence[type[Slice]],
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
        self.name = name
        self.ask_decision = ask_decision
        self.plan = plan if plan.revision else replace(plan, revision=FIRST_REVISION)
        """The plan with the present layout of the shards."""
        self.archive = archive
        self.journal = journal
        self.clock = clock
        self.monotonic = monotonic
        self.recheck_interval = recheck_interval
        self.heartbeat_timeout = heartbeat_timeout
        self.pool = Pool(limits or plan.limits, journal, slices)
        """The rules and the state. Other code in the same process may read them."""
        self.pool.state.tombstones.key = plan.uid.encode()
        self.before_commit: list[Callable[[], None]] = []
        """Called whenever the pool may have changed."""
        self.on_flushed: list[Callable[[str, Sequence[str]], None]] = []
        """Called when a gateway has flushed what it was asked for."""
        self.on_stats: list[Callable[[PoolStats], PoolStats]] = []
        """Add to the statistics of the shard what slices count."""
        self._refusal = refusal
        self._on_journal_failure = on_journal_failure
        self._commits = GroupCommit(self._write_journal, self._end)
        self._floor: DiskFloor | None = None
        self._restore()
        self.epoch = uuid4().hex
        """Another one after each start."""
        self.watch_epoch = self.epoch
        """Watchers that know another one read everything again, and lose what is no longer there."""
        self.engine_reports = EngineReports(monotonic)
        self.heartbeats = LeaseHeartbeats(self.pool.state, heartbeat_timeout)
        self.news = ShardNews(self)
        self.gateways = GatewayRoster(
            self.pool.state.gateways, monotonic, lambda gateway: self.news.post(flush_topic(gateway))
        )
        for part in self.pool.state.slices:
            part.attach(self)

    def _restore(self) -> None:
        stopped_at = None
        if self.journal is not None:
            log.info("shard %s restored %s", self.name, restore_pool(self.pool, self.journal))
            store, stopped_at = self.journal.store, self.journal.pool_time()
            self._floor = DiskFloor(self.plan.min_free_bytes, store.free_bytes, shard=self.name, place=store.name)
        if self.pool.state.layouts[-1].revision > self.plan.revision:  # it changed after the shard was created
            self.plan = self.plan.with_layouts(self.pool.state.layouts)
        self._note_layouts()
        self._pool_time_offset = (self.clock() if stopped_at is None else stopped_at) - self.monotonic()
        self.pool.state.restart_sessions(self.pool_time())

    # -- transactions --------------------------------------------------------------------------------------------------

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
        self.news.look()

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

    # -- what operations share -----------------------------------------------------------------------------------------

    def renew_watch_epoch(self) -> None:
        self.watch_epoch = uuid4().hex

    @property
    def serving(self) -> Serving:
        return replace(self.pool.state.serving, epoch=self.epoch)

    def attach(self, trajectory_uid: str, gateway: str) -> None:
        """The gateway serves the trajectory."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if trajectory is not None:
            self.pool.state.touch_session(trajectory)
        if gateway:
            self.gateways.watch()
        if gateway in self.pool.state.gateways:
            self.gateways.note(gateway)
        elif gateway:
            self.note_gateway(gateway)
        if trajectory is not None and gateway and gateway not in trajectory.gateways:
            self.pool.state.set_gateways(trajectory, {*trajectory.gateways, gateway})

    def note_gateway(self, gateway: str) -> None:
        """It lives. After a restart of the shard it is asked too."""
        for ended in self.gateways.take_predecessors(gateway):
            self.pool.state.lose_gateway(ended, heir=gateway)
            self.news.remove(flush_topic(ended))
        self.gateways.note(gateway)
        self.look_for_dead()
        self.pool.state.set_living_gateways(self.gateways.living())

    def look_for_dead(self) -> None:
        """The rollouts that a dead gateway served may lack a call."""
        for gateway, has_told in self.gateways.take_dead().items():
            log.warning("gateway %s was not heard for %g s: it is taken for dead", gateway, HEARTBEAT)
            if not has_told:
                self.pool.state.lose_untold(gateway)
            self.pool.state.lose_gateway(gateway)
            self.news.remove(flush_topic(gateway))

    def note_told(self, gateway: str, calls: Sequence[CallBegun]) -> None:
        """These are all calls that it has under way."""
        for call in calls:
            self.attach(call.trajectory_uid, gateway)
        self.pool.state.tell_calls(gateway, calls)
        self.gateways.note_told(gateway)

    def holders(self, trajectory_uid: str, but: str) -> set[str]:
        """The other gateways that may hold steps of a trajectory. Without the name of one, they are not known."""
        trajectory = self.pool.state.trajectories.get(trajectory_uid)
        if not but or trajectory is None or trajectory.completed or not trajectory.is_at_home:
            return set()
        self.note_gateway(but)
        return self.gateways.holders(trajectory, but=but)

    def check_flushed(self, trajectory_uid: str, gateway: str) -> None:
        """FlushNeeded if another gateway than this one may hold steps of the trajectory."""
        if self.holders(trajectory_uid, gateway):
            raise FlushNeeded(trajectory_uid, gateway)

    def keep_late(self, reward: RewardGiven) -> bool:
        """Write the reward to the archive; False if there is none."""
        if self.archive is None:
            return False
        revision = self.pool.state.count_late_reward(reward.trajectory_uid)
        self.archive.add_late_reward(LateReward(**asdict(reward), revision=revision, at=self.clock()))
        return True


class ShardNews(NewsBoard):
    """Posts what has changed in the shard."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.epoch)
        self._shard = shard
        self._marks: dict[str, object] = {}
        """By topic: what was posted last."""
        self._watch = Watch(shard.recheck_interval, self._recheck)

    async def wait(self, asker: str, seen: Seen, timeout: float) -> News:
        self._shard.begin()
        self.look()
        self._watch.start()
        news = await super().wait(asker, seen, timeout)
        self._shard.check_open()
        return news

    def look(self) -> bool:
        """Post what is new. Returns whether there was something."""
        state, number = self._shard.pool.state, self._number
        if self._is_new(SERVING, state.serving):
            self.post(SERVING, replace(state.serving, epoch=self._epoch))
        if self._is_new(PLAN, self._shard.plan):
            self.post(PLAN, self._shard.plan)
        if self._is_new(SYNC, is_expected := self._shard.engine_reports.is_sync_expected):
            self.post(SYNC, is_expected)
        if self._is_new(UNSCORED, state.offered_for_scoring):
            self.post(UNSCORED)
        if self._is_new(CHANGES, state.change_log.last_position):
            self.post(CHANGES)
        for name, channel in state.channels.items():
            if self._is_new(topic := ready_topic(name), counts := channel.ready_counts(), ReadyCounts()):
                self.post(topic, counts)
        return self._number > number

    def _is_new(self, topic: str, mark: object, first: object = None) -> bool:
        before = self._marks.get(topic, first)
        self._marks[topic] = mark
        return mark is not before and mark != before

    async def _recheck(self, passed: float) -> bool:
        """Posts what is new. Returns whether somebody still waits for news."""
        try:
            self._shard.begin()
            if self.look():
                await self._shard.commit()
        except PoolUnavailable:  # the shard answers nothing any more
            self.end_questions()
        return self.is_asked
