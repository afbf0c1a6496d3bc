"""How programs reach a DataPool: gateways, reward workers, the Atropos server and watchers by `PoolClient` (async),
trainers by `DataPool` (blocking).

- A call is routed by prompt_uid alone.
- A shard that restarts is waited for, with a bound.
- Every failure is one of Stepwell's own errors, with one line of text.
"""

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from stepwell.errors import BadRequest, Conflict, PoolUnavailable
from stepwell.pool.api.curation import AuditEntry, Curation, CurationOutcome
from stepwell.pool.api.leasing import (
    BatchRequest,
    BatchTerms,
    ExactFill,
    HasLeases,
    LeasedGroups,
    ReadyGroups,
    merge_ready_groups,
    read_batch_request,
)
from stepwell.pool.api.news import SERVING, SYNC, UNSEEN
from stepwell.pool.api.pacing import Pacing, merge_pacing
from stepwell.pool.api.policy import Canary, PolicyDecision, PolicyStatus, VersionRewards
from stepwell.pool.api.producing import (
    TRAIN,
    RewardGiven,
)
from stepwell.pool.api.serving_state import ChannelPolicy, Serving
from stepwell.pool.api.stats import PoolStats, merge_stats
from stepwell.pool.api.transport import ActorFailed, ActorTransport
from stepwell.pool.client.batch import Batch, batch_of
from stepwell.pool.client.exact_fill import fill_exactly
from stepwell.pool.client.fetching import fetch_oldest
from stepwell.pool.client.held_leases import HEARTBEAT_INTERVAL
from stepwell.pool.client.policy_versions import PolicyClient
from stepwell.pool.client.producer_client import ProducerClient
from stepwell.pool.client.ray_cluster import join_ray
from stepwell.pool.client.ready_batches import take_ready
from stepwell.pool.client.scoring import ScoringClient
from stepwell.pool.client.shards import CALL_TIMEOUT, PART_TIMEOUT, ShardSet
from stepwell.pool.client.version_delivery import VersionDelivery
from stepwell.pool.client.watching import WatchClient
from stepwell.pool.shard.ray_transport import RayTransport
from stepwell.steps.step import Step
from stepwell.steps.step_filter import make_step_filter

if TYPE_CHECKING:
    from stepwell.pool.shard.service import ShardService

T = TypeVar("T")

SERVING_RETRY_PAUSE = 1.0
CHECK_TIMEOUT = 1.0
REPORT_TIMEOUT = 0.5
"""Seconds that a question about what engines report may take."""
REPORT_WAIT = 5.0
"""Seconds in which gateways must have seen a new version of an engine; they look twice a second. Without any answer in
this time, versions are not checked."""
REPORT_PAUSE = 0.1
ANNOUNCE_INTERVAL = 5.0
"""Seconds in which a trainer is announced once. A first shard that restarts has not heard of it for so long at most."""
NO_REPORTS = (PoolUnavailable, ActorFailed)
"""The first shard is away, or of an older release."""
DELIVERY_LEASE = 60.0
"""Seconds. The lease of a batch that is acknowledged on arrival."""


class PoolClient(ScoringClient, ProducerClient, WatchClient, PolicyClient):
    """Reaches every shard of one DataPool, by Ray unless another transport is given. Implements the ports of the pool.

    `timeout` is the time in seconds that a call waits for a shard, `part_timeout` that of a question to all shards.
    """

    def __init__(
        self,
        name: str,
        namespace: str = "default",
        *,
        transport: ActorTransport | None = None,
        timeout: float = CALL_TIMEOUT,
        part_timeout: float = PART_TIMEOUT,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
    ) -> None:
        shards = transport or RayTransport(namespace)
        super().__init__(
            ShardSet(name, shards, namespace=namespace, timeout=timeout, part_timeout=part_timeout), heartbeat_interval
        )
        self._serving: Serving | None = None
        self._serving_changed = asyncio.Event()
        self._sync_expected: bool | None = None
        """As the pool has last told; None while it tells nothing."""
        self._reported: tuple[str, str, Mapping[str, int | None]] | None = None
        """What the shard with this epoch knows of the engines of a gateway."""
        self._announced_at = -math.inf
        self._versions = VersionDelivery(self.shards, self._note_serving)
        self._last_pacing: dict[tuple[str, str], Pacing] = {}
        """By channel and shard."""

    @property
    def policy_version(self) -> int:
        return 0 if self._serving is None else self._serving.policy_version

    @property
    def serving(self) -> Serving | None:
        return self._serving

    async def serving_after(self, seen: Serving | None) -> Serving:
        while self._serving is None or self._serving == seen:
            await self._serving_changed.wait()
        return self._serving

    async def change_engines(self, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()) -> None:
        self._note_serving(await self.shards.at(self.shards.pool).change_engines(add, remove))

    async def engines(self) -> tuple[str, ...]:
        """The addresses of all engines, as the pool knows them now."""
        return (await self.newest_serving()).engines or ()

    async def report_engines(self, versions: Mapping[str, int | None]) -> bool | None:
        gateway, epoch = self._flushes.gateway, "" if self._serving is None else self._serving.epoch
        if not gateway:
            return None
        if self._sync_expected is not None and self._reported == (gateway, epoch, versions):
            return self._sync_expected
        try:
            expected = await self._engine_reports().report_engines(gateway, dict(versions))
        except NO_REPORTS:
            return True
        self._reported = (gateway, epoch, dict(versions))
        return expected

    async def announce_sync(self) -> None:
        """A trainer lives that brings weights to the engines. Call it at least once a minute: as long as it is heard,
        gateways hold calls to engines that wait for weights."""
        if time.monotonic() < self._announced_at + ANNOUNCE_INTERVAL:
            return
        with suppress(*NO_REPORTS):
            await self._engine_reports().announce_sync()
            self._announced_at = time.monotonic()

    def _engine_reports(self) -> "ShardService":
        return self.shards.at(self.shards.pool, timeout=REPORT_TIMEOUT)

    async def pacing(self, channel: str) -> Pacing:
        """A shard that does not answer counts with its last numbers, so that not too many rollouts are started."""
        answer = await self.shards.ask_all(lambda shard: shard.pacing(channel))
        for name, part in answer.by_shard.items():
            if part.in_flight or part.queued or part.batch:
                self._last_pacing[channel, name] = replace(part, refills=())
        away = [self._last_pacing[channel, name] for name in answer.missing if (channel, name) in self._last_pacing]
        return merge_pacing([*answer.parts, *away], (await self.shards.plan()).limits.batch_size, answer.missing)

    async def fetch_batch(
        self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Unpack[BatchTerms]
    ) -> Batch:
        """Without a lease, the batch is acknowledged as soon as it has arrived here."""
        request = await self._request(count, **terms)
        seconds = DELIVERY_LEASE if lease is None else lease
        leased = await fetch_oldest(self.shards, self._held, request, timeout, seconds)
        if lease is None:
            try:
                await self.ack(leased)
            except BaseException:
                self._held.put_back(leased.leases)
                raise
        return batch_of(leased)

    async def fetch_ready(self, most: int, *, lease: float, **terms: Unpack[BatchTerms]) -> list[Batch]:
        """At once, possibly none."""
        if most < 1:
            raise BadRequest(f"ask for one batch or more, not {most}")
        request = await self._request(1, **terms)
        return [batch_of(leased) for leased in await take_ready(self.shards, self._held, request, most, lease)]

    async def _request(self, count: int, **terms: Unpack[BatchTerms]) -> BatchRequest:
        """In the pool's order, unless the terms name one."""
        terms.setdefault("order", (await self.shards.plan()).limits.order)
        return read_batch_request(count, **terms)

    async def fill_batch(
        self,
        trajectories: int,
        *,
        channel: str,
        shares: Mapping[str, float],
        lease: float,
        min_exactness: str = "retokenized",
        untrainable: bool = True,
        heartbeats: bool = True,
    ) -> LeasedGroups | None:
        step_filter = make_step_filter(min_exactness, untrainable)
        request = ExactFill(
            trajectories=trajectories, channel=channel, shares=shares, lease=lease, step_filter=step_filter
        )
        return await fill_exactly(self.shards, self._held, request, heartbeats=heartbeats)

    async def ready_groups(self, channel: str) -> ReadyGroups:
        answer = await self.shards.ask_all(lambda shard: shard.ready_groups(channel))
        return merge_ready_groups(answer.parts, answer.missing)

    async def clear(self, channel: str) -> int:
        return sum(await self.shards.call_all(lambda shard: shard.clear(channel)))

    async def ack(self, leased: HasLeases) -> None:
        """Of each batch all parts, or none. It can be repeated."""
        await self._held.ack(leased.leases)

    async def nack(self, leased: HasLeases) -> None:
        await self._held.nack(leased.leases)

    async def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """A shard that is away gets the version when it is back, as long as this process lives. Conflict if no engine
        reports the version, unless `check` is False."""
        if check:
            await self._require_reported(version)
        await self._versions.deliver(version)

    async def _require_reported(self, version: int) -> None:
        await self.shards.plan()
        deadline, why = time.monotonic() + REPORT_WAIT, None
        while time.monotonic() < deadline:
            with suppress(*NO_REPORTS):  # a late answer is no leave: the question is asked again
                why = await self._engine_reports().why_unreported(version)
                if why is None:
                    return
            await asyncio.sleep(REPORT_PAUSE)
        if why is not None:
            raise Conflict(why)

    async def decide(
        self, decision: PolicyDecision, canary: Canary | None = None, policy_version: int | None = None
    ) -> None:
        """Keeps the decision and sets the canary, or ends it if it is None, in one change of the first shard. Returns
        when the other shards have the policy version and know which versions are withdrawn."""
        serving = await self.shards.at(self.shards.pool).decide_policy(decision, canary, policy_version)
        self._note_serving(serving)
        await self._versions.deliver_decided(serving)

    async def stats(self) -> PoolStats:
        answer = await self.shards.ask_all(lambda shard: shard.stats())
        return merge_stats(answer.parts, answer.missing)

    async def quarantined(self) -> list[Step]:
        return [step for answer in await self.shards.call_all(lambda shard: shard.quarantined()) for step in answer]

    async def check(self) -> None:
        await self.shards.plan(timeout=CHECK_TIMEOUT)
        names = await self.shards.names()
        stats = await asyncio.gather(*(self.shards.at(name, timeout=CHECK_TIMEOUT).stats() for name in names))
        short = [name for name, part in zip(names, stats, strict=True) if part.short_of_disk]
        if short:
            raise PoolUnavailable(
                f"{', '.join(short)}: no new data is taken, because the disk of the journal is nearly full. Free some "
                "space there, or let trainers take what the pool holds; steps wait in the gateways meanwhile"
            )

    async def follow(self) -> None:
        """Keep `serving` up to date, until cancelled. A change arrives as soon as the pool has it."""
        seen = dict.fromkeys((SERVING, SYNC), UNSEEN)
        while True:
            try:
                news = await self.shards.wait_news(self.shards.pool, seen)
            except PoolUnavailable:
                self._sync_expected = None
                seen[SYNC] = UNSEEN
                await asyncio.sleep(SERVING_RETRY_PAUSE)
                continue
            seen |= {topic: item.revision for topic, item in news.items()}
            if SERVING in news:
                self._note_serving(news[SERVING].value)
            if SYNC in news:
                self._sync_expected = news[SYNC].value

    def _note_serving(self, serving: Serving) -> None:
        """An answer that was on its way while a change was made here may be older than what is known."""
        if self._serving is not None and serving.is_older_than(self._serving):
            return
        self._serving = serving
        self._serving_changed.set()
        self._serving_changed = asyncio.Event()


class DataPool:
    """A DataPool for a training loop. Its calls block; they work in scripts and in notebooks."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stepwell-pool", daemon=True).start()

    def fetch_batch(
        self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Unpack[BatchTerms]
    ) -> Batch:
        """The oldest ready groups (or trajectories, or steps), as soon as there are that many.

        FetchTimeout says what is missing. With a `lease`, a batch is yours until you acknowledge or return it, or this
        process dies; `lease` is the longest time in seconds without heartbeats from here. Without a lease, it counts as
        trained on arrival. The terms, all optional: `channel`, `unit` ("groups",
        "trajectories", "steps"), `order` ("oldest_ready", "strict"; else the pool's), `history` (the share drawn from
        trained groups), `min_exactness` ("engine", "submitted", "retokenized") and `untrainable` (include steps that
        are marked so).
        """
        return self._run(self._client.fetch_batch(count, timeout=timeout, lease=lease, **terms))

    def fetch_ready(self, most: int, *, lease: float, **terms: Unpack[BatchTerms]) -> list[Batch]:
        """What is ready now, at most so many groups (or trajectories, or steps), each as a batch of its own.

        For a trainer that takes single groups and acknowledges them one by one: it costs one call for all of them. With
        several shards, each gives its oldest ones. `lease` and the terms are those of `fetch_batch`.
        """
        return self._run(self._client.fetch_ready(most, lease=lease, **terms))

    @contextmanager
    def batch(
        self, count: int, *, timeout: float = 60.0, lease: float = 600.0, **terms: Unpack[BatchTerms]
    ) -> Iterator[Batch]:
        """A batch for a `with` block: acknowledged at its end, given back on an exception."""
        batch = self.fetch_batch(count, timeout=timeout, lease=lease, **terms)
        try:
            yield batch
        except BaseException:
            self.nack(batch)
            raise
        self.ack(batch)

    def ack(self, leased: HasLeases) -> None:
        """The batch was trained, all of it. LeaseExpired if the pool has not heard of this process for too long: the
        batch will be handed out again. PoolUnavailable if a shard is away: call it again later."""
        self._run(self._client.ack(leased))

    def nack(self, leased: HasLeases) -> None:
        """The batch was not trained: it goes back to the head of the queue."""
        self._run(self._client.nack(leased))

    def give_reward(self, reward: RewardGiven) -> bool:
        """Score a trajectory or one of its steps, also for a second time.

        If it is already shipped, the archive keeps the reward; False if there is no archive.
        """
        return self._run(self._client.give_reward(reward))

    def pacing(self, channel: str = TRAIN) -> Pacing:
        """How many new trajectories may start."""
        return self._run(self._client.pacing(channel))

    def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """Call it when the engines have new weights and report their version; a WeightSync calls it by itself.

        Conflict if gateways know what their engines report, and none reports this version: engines without a known
        version get no calls. With `check=False` it is set all the same. A shard that is away gets the version when it
        is back, as long as this process lives.
        """
        self._run(self._client.set_policy_version(version, check=check))

    def announce_sync(self) -> None:
        """A trainer lives that brings weights to the engines; a WeightSync announces itself. Call it at least once a
        minute: as long as it is heard, gateways hold calls to engines that wait for weights, instead of failing them.
        """
        self._run(self._client.announce_sync())

    @property
    def policy_version(self) -> int:
        """The version that all sessions get, except those of a canary."""
        return self._run(self._client.newest_serving()).policy_version

    def channel_policy(self, channel: str) -> ChannelPolicy:
        """The adapter that serves the calls of a channel, and whether they are held."""
        return self._run(self._client.channel_policy(channel))

    def set_adapter(self, channel: str, adapter: str, version: int) -> None:
        """Call it when the engines have the adapter: the channel's calls go to it from now on, and its steps age by
        this version. Other channels notice nothing."""
        self._run(self._client.set_adapter(channel, adapter, version))

    def pause_channel(self, channel: str, *, paused: bool = True) -> None:
        """Gateways hold the channel's new calls until it goes on with `paused=False`."""
        self._run(self._client.pause_channel(channel, paused=paused))

    def canary(self) -> Canary | None:
        """The newer version that a share of the sessions gets."""
        return self._run(self._client.canary())

    def decide(self, decision: PolicyDecision, canary: Canary | None = None, policy_version: int | None = None) -> None:
        """Keeps a decision about a version and sets the canary, or ends it if it is None, in one change.

        `policy_version` is what all other sessions get from now on. Conflict if a version is to be promoted that was
        refused or rolled back. The same decision again changes nothing.
        """
        self._run(self._client.decide(decision, canary, policy_version))

    def decisions(self) -> list[PolicyDecision]:
        """The last decisions about versions, the oldest first."""
        return self._run(self._client.decisions())

    def version_rewards(self, channel: str = TRAIN, cursor: dict[str, str] | None = None) -> VersionRewards:
        """The first reward of each step and trajectory since the cursor, with the version that said it.

        Without a cursor, only where the rewards end now.
        """
        return self._run(self._client.version_rewards(channel, cursor))

    def policy_status(self, channel: str = TRAIN) -> PolicyStatus:
        """The canary, the last decisions, and what the versions earned lately in a channel."""
        return self._run(self._client.policy_status(channel))

    def engines(self) -> tuple[str, ...]:
        """The addresses of the engines that gateways use now."""
        return self._run(self._client.engines())

    def stats(self) -> PoolStats:
        """`missing` names the shards that did not answer within 1.5 seconds. They are not counted."""
        return self._run(self._client.stats())

    def curate(self, curation: Curation) -> CurationOutcome:
        """Mark, reject or relabel a trajectory. The decision holds for every later batch."""
        return self._run(self._client.curate(curation))

    def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """What people decided about trajectories, newest first. PoolUnavailable if a shard does not answer."""
        page = self._run(self._client.audit(limit, trajectory_uid))
        if page.missing:
            raise PoolUnavailable(f"no audit of {', '.join(page.missing)}, which did not answer; try again")
        return list(page.entries)

    def quarantined(self) -> list[Step]:
        """The last quarantined steps, each with its reason."""
        return self._run(self._client.quarantined())

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return running.result()
        except BaseException:  # a fetch that was interrupted must not go on and take a batch
            running.cancel()
            raise


def connect(name: str = "data_pool", *, address: str = "auto", namespace: str = "default") -> DataPool:
    """Reach the DataPool of that name, joining the Ray cluster first if this process has not."""
    join_ray(address, namespace)
    return DataPool(PoolClient(name, namespace))
