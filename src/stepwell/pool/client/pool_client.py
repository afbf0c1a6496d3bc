"""How gateways, reward workers, the Atropos server and watchers reach a DataPool. Trainers use `DataPool`.

- A call about a group is routed by its prompt_uid alone.
- A shard that restarts is waited for, with a bound. Every call raises PoolUnavailable instead of waiting without end.
- Answers about the whole pool name the shards that did not answer, and do without them.
- Every failure is one of Stepwell's own errors, with one line of text.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from stepwell.errors import BadRequest, UnknownTrajectory
from stepwell.pool.api.leasing import (
    BatchPreview,
    BatchRequest,
    BatchTerms,
    ExactFill,
    HasLeases,
    LeasedGroups,
    ReadyGroups,
    merge_ready_groups,
    read_batch_request,
)
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import Canary, ChannelPolicy, PolicyDecision, PolicyStatus, Serving, VersionRewards
from stepwell.pool.api.producing import (
    TRAIN,
    CallBegun,
    EndResult,
    HeldCalls,
    Pacing,
    RecordedTurn,
    Registration,
    RewardGiven,
    SubmitVerdict,
    merge_pacing,
)
from stepwell.pool.api.scoring import Judgement
from stepwell.pool.api.sessions import SessionCall, SessionPlace
from stepwell.pool.api.stats import PoolStats, TimeSeries, merge_stats
from stepwell.pool.api.transport import ActorTransport
from stepwell.pool.api.watching import Changes, Cursor
from stepwell.pool.client.asking import AskingClient, ask_any, rows_of, submit_to_owners
from stepwell.pool.client.batch import Batch, batch_of
from stepwell.pool.client.exact_fill import fill_exactly
from stepwell.pool.client.fetching import fetch_and_ack, fetch_oldest, take_ready
from stepwell.pool.client.following import FlushFollower, ServingWatch, VersionDelivery
from stepwell.pool.client.held_leases import HEARTBEAT_INTERVAL, HeldLeases, ScoringTurns
from stepwell.pool.client.shards import CALL_TIMEOUT, PART_TIMEOUT, ShardSet
from stepwell.pool.client.watching import WATCH_TIMEOUT, preview_batch, read_changes, read_steps, require_usable
from stepwell.pool.shard.ray_transport import RayTransport
from stepwell.pool.slices.curation import AuditPage, Curate, Curation, CurationOutcome, ReadAudit
from stepwell.pool.slices.policy import (
    ChangeEngines,
    Decide,
    PauseChannel,
    ReadDecisions,
    ReadRewardTallies,
    ReadVersionRewards,
)
from stepwell.pool.slices.producing import (
    Abort,
    AddGroups,
    AddSteps,
    BeginCall,
    ChannelIfOpen,
    ChannelOf,
    Complete,
    EndCall,
    FindSession,
    FindStepExtras,
    FindTurns,
    GiveReward,
    MarkUnseen,
    MoveTrajectory,
    PlaceSession,
    Register,
)
from stepwell.pool.slices.watching import ReadSeries
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import JsonObject, Step
from stepwell.steps.trainable import make_step_filter


class PoolClient(AskingClient):
    """Reaches every shard of one DataPool, by Ray unless another transport is given.

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
        reached = transport or RayTransport(namespace)
        shards = ShardSet(name, reached, namespace=namespace, timeout=timeout, part_timeout=part_timeout)
        super().__init__(shards)
        self._held = HeldLeases(shards, interval=heartbeat_interval)
        self._serving = ServingWatch(shards)
        self._versions = VersionDelivery(shards, self._serving.note)
        self._scoring = ScoringTurns(shards, self._held)
        self._last_pacing: dict[tuple[str, str], Pacing] = {}
        """By channel and shard."""
        self._flushes = FlushFollower(shards, self.ask_shard)

    async def check(self) -> None:
        """Raise PoolUnavailable, with the reason, if the pool cannot be used now."""
        await require_usable(self.shards)

    async def pool_uid(self) -> str:
        """Another pool of the same name has another one. Empty for a pool without journals."""
        return (await self.shards.plan()).uid

    # -- trajectories --------------------------------------------------------------------------------------------------

    async def channel_if_open(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        """The channel of an open trajectory; None if it is not open."""
        return await self.ask(ChannelIfOpen(trajectory_uid, prompt_uid, self._flushes.gateway))

    async def channel_of(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        """The channel of a trajectory that the pool holds, open or ended; None if it holds no such one."""
        return await self.ask(ChannelOf(trajectory_uid, prompt_uid))

    async def place_session(self, call: SessionCall) -> SessionPlace | None:
        """The trajectory that a session is in. If none is open, one is opened, unless the call says otherwise."""
        return await self.ask(PlaceSession(replace(call, gateway=self._flushes.gateway)))

    async def find_session(self, user: str, replied: str) -> str:
        """The id of this user's session that a call continues whose history has this digest; empty if there is none."""
        return await self.ask(FindSession(user, replied))

    async def register_trajectory(self, registration: Registration) -> None:
        await self.ask(Register(replace(registration, gateway=self._flushes.gateway)))

    async def move_trajectory(self, trajectory_uid: str, prompt_uid: str, to_prompt_uid: str) -> None:
        """An open trajectory joins another group. Conflict if it has steps."""
        await self.register_trajectory(await self.ask(MoveTrajectory(trajectory_uid, prompt_uid, to_prompt_uid)))

    async def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        """The steps of an open trajectory that a call continues whose history has this digest."""
        return await self.ask(FindTurns(trajectory_uid, prompt_uid, replied, self._flushes.gateway))

    async def step_extras(self, trajectory_uid: str, prompt_uid: str, name: str, uid: str) -> dict[str, JsonObject]:
        """What the steps of an open trajectory have under this name in their extras, by the steps' uids. If the step
        `uid` is not among them, other gateways are asked whether they hold it."""
        return await self.ask(FindStepExtras(trajectory_uid, prompt_uid, name, uid, self._flushes.gateway))

    async def complete_trajectory(
        self, trajectory_uid: str, prompt_uid: str, reward: float | None, failure: str = ""
    ) -> EndResult:
        """A rollout in which the policy failed counts in its group even if no call of it was recorded."""
        return await self.ask(Complete(trajectory_uid, prompt_uid, reward, failure, self._flushes.gateway))

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        return await self.ask(Abort(trajectory_uid, prompt_uid))

    # -- calls and steps -----------------------------------------------------------------------------------------------

    async def begin_call(self, call: CallBegun) -> None:
        """An engine was asked for a step of an open trajectory. The pool's answer may wait for other announcements."""
        await self.ask(BeginCall(replace(call, gateway=self._flushes.gateway)))

    async def end_call(self, trajectory_uid: str, prompt_uid: str, uid: str, *, is_lost: bool) -> None:
        """An announced call brings no step. `is_lost`: it had one, which the gateway has given up."""
        await self.ask(EndCall(trajectory_uid, prompt_uid, uid, is_lost))

    async def mark_unseen(self, trajectory_uid: str, prompt_uid: str, step_uids: Sequence[str], reason: str) -> None:
        """What is known of who read these steps (see MarkUnseen). Safe to repeat."""
        await self.ask(MarkUnseen(trajectory_uid, prompt_uid, step_uids, reason))

    async def follow_flushes(
        self, flush: Callable[[str], Awaitable[None]], held: Callable[[], HeldCalls] = HeldCalls, gateway: str = ""
    ) -> None:
        """Serve trajectories as a gateway, until cancelled. `flush` is called with a trajectory_uid when the pool needs
        all steps that are held here; it returns when the pool has them. `held` is what it knows of its calls. The name
        of this process begins with `gateway`."""
        await self._flushes.run(flush, held, gateway)

    async def stop_serving(self) -> None:
        """This gateway ends, and holds nothing."""
        await self._flushes.leave()

    async def shard_finder(self) -> Callable[[str], str]:
        """Which shard has the groups of a prompt_uid, so that what is sent to one need not wait for another."""
        plan = await self.shards.plan()
        return lambda prompt_uid: plan.owners(prompt_uid)[0]

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        """One verdict per step, in order. Safe to repeat: a step is accepted once."""

        async def submit(shard: str, indexes: list[int], plan: PoolPlan) -> list[SubmitVerdict]:
            own = replace(pack([steps[index] for index in indexes]), sent_at=time.time())
            return await self.ask_at(AddSteps(own, channel, group_size), shard, plan)

        return await submit_to_owners(self.shards, [step.prompt_uid for step in steps], submit)

    async def submit_groups(self, steps: Sequence[Step], registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        return await self.submit_columns(pack(steps), registrations)

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """Register trajectories and submit their steps, many groups in one message to each shard. One verdict per step,
        in order. If all steps belong to one shard, nothing is copied. Safe to repeat: a step is accepted once."""

        async def submit(shard: str, indexes: list[int], plan: PoolPlan) -> list[SubmitVerdict]:
            uids = {columns.trajectory_uids[index] for index in indexes}
            registered = [one for one in registrations if one.trajectory_uid in uids]
            return await self.ask_at(AddGroups(rows_of(columns, indexes), registered), shard, plan)

        return await submit_to_owners(self.shards, columns.prompt_uids, submit)

    # -- rewards -------------------------------------------------------------------------------------------------------

    async def give_reward(self, reward: RewardGiven) -> bool:
        """True if it is kept: for training, or, after the trajectory was handed out, in the archive."""
        give = GiveReward(replace(reward, gateway=self._flushes.gateway))
        try:
            return await self.ask(give)
        except UnknownTrajectory as unknown:
            return await ask_any(self.shards, partial(self.ask_at, give), unknown)

    async def take_unscored(
        self, count: int, *, lease: float, timeout: float, by_step: bool = False
    ) -> tuple[str, list[list[Step]]] | None:
        """A reward lease, and the steps of up to `count` trajectories in order; None if there is none for `timeout`. A
        trajectory without a judgement after `lease` seconds is offered to other workers. `by_step` asks for open
        trajectories too, each time they have grown."""
        return await self._scoring.take(count, lease, timeout, by_step)

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        """For each, whether it counted. Safe to repeat."""
        return await self._scoring.give(judgements)

    # -- batches -------------------------------------------------------------------------------------------------------

    async def fetch_batch(
        self, count: int, *, timeout: float = 60.0, lease: float | None = None, **terms: Unpack[BatchTerms]
    ) -> Batch:
        """Without a lease, the batch is acknowledged as soon as it has arrived here."""
        request = await self._request(count, **terms)
        if lease is None:
            return batch_of(await fetch_and_ack(self.shards, self._held, request, timeout))
        return batch_of(await fetch_oldest(self.shards, self._held, request, timeout, lease))

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
        """The oldest groups with exactly that many trajectories, or None. Shares: see pool/rules/exact_batch.py.

        With `heartbeats` they go back to the queue soon after the death of this process. Without, they do unless they
        are acknowledged within `lease` seconds, by whatever process.
        """
        accepts = make_step_filter(min_exactness, untrainable)
        request = ExactFill(trajectories=trajectories, channel=channel, shares=shares, lease=lease, step_filter=accepts)
        return await fill_exactly(self.shards, self._held, request, heartbeats=heartbeats)

    async def ready_groups(self, channel: str) -> ReadyGroups:
        answer = await self.shards.ask_all(lambda shard: shard.ready_groups(channel))
        return merge_ready_groups(answer.parts, answer.missing)

    async def clear(self, channel: str) -> int:
        """Drop every group that is not under lease. Returns their number."""
        return sum(await self.shards.call_all(lambda shard: shard.clear(channel)))

    async def ack(self, leased: HasLeases) -> None:
        """It is delivered: of each batch all parts, or none. It can be repeated. LeaseExpired if that took too long:
        then some of it is handed out again."""
        await self._held.ack(leased.leases)

    async def nack(self, leased: HasLeases) -> None:
        """It is not delivered: it goes back to the head of the queue."""
        await self._held.nack(leased.leases)

    # -- what serves the policy ----------------------------------------------------------------------------------------

    @property
    def serving(self) -> Serving | None:
        """The newest that the pool has reported; None before its first answer."""
        return self._serving.newest

    @property
    def policy_version(self) -> int:
        """The newest version that the pool has reported."""
        return 0 if self.serving is None else self.serving.policy_version

    async def serving_after(self, seen: Serving | None) -> Serving:
        """Returns what serves the policy as soon as the pool reports something other than `seen`."""
        return await self._serving.after(seen)

    async def follow(self) -> None:
        """Keep `policy_version` and `serving` fresh, until cancelled. A change arrives as soon as the pool has it."""
        await self._serving.follow()

    async def newest_serving(self) -> Serving:
        """Asks the pool what serves the policy now; `serving` is what it last reported."""
        return await self.shards.at(self.shards.pool).serving()

    async def canary(self) -> Canary | None:
        """The newer version that a share of the sessions gets, as the pool knows it now."""
        return (await self.newest_serving()).canary

    async def engines(self) -> tuple[str, ...]:
        """The addresses of all engines, as the pool knows them now."""
        return (await self.newest_serving()).engines or ()

    async def change_engines(self, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()) -> None:
        """Engines join and leave, for all gateways and trainers."""
        self._serving.note(await self.ask(ChangeEngines(add, remove)))

    async def report_engines(self, versions: Mapping[str, int | None]) -> bool | None:
        """Tell the pool which version each engine reports, by address: 0 are the weights that it was started with, None
        is unknown. The answer: whether a trainer lives that syncs weights, True also if the pool cannot be asked; None
        if this process is not known to the pool yet."""
        gateway = self._flushes.gateway
        return await self._serving.report(gateway, versions) if gateway else None

    async def announce_sync(self) -> None:
        """A trainer lives that brings weights to the engines. Call it at least once a minute: as long as it is heard,
        gateways hold calls to engines that wait for weights."""
        await self._serving.announce_sync()

    async def set_policy_version(self, version: int, *, check: bool = True) -> None:
        """A shard that is away gets the version when it is back, as long as this process lives. Conflict if no engine
        reports the version, unless `check` is False."""
        if check:
            await self._serving.require_reported(version)
        await self._versions.deliver(version)

    async def decide(
        self, decision: PolicyDecision, canary: Canary | None = None, policy_version: int | None = None
    ) -> None:
        """Keeps the decision and sets the canary, or ends it if it is None, in one change of the first shard; `refuse`
        and `overdue` leave the canary as it is. `policy_version`: the version that all other sessions get from now on.
        Conflict if a withdrawn version is to be promoted. Returns when the other shards have the policy version and
        know which versions are withdrawn."""
        serving = await self.ask(Decide(decision, canary, policy_version))
        self._serving.note(serving)
        await self._versions.deliver_decided(serving)

    async def decisions(self) -> list[PolicyDecision]:
        """The last ones about versions of the policy, the oldest first."""
        return await self.ask(ReadDecisions())

    async def version_rewards(self, channel: str, cursor: dict[str, str] | None = None) -> VersionRewards:
        """What was rewarded since the cursor; without one, only where the rewards end now. A shard that does not answer
        is read later."""
        return await self.ask(ReadVersionRewards(channel, cursor), timeout=WATCH_TIMEOUT)

    async def channel_policy(self, channel: str) -> ChannelPolicy:
        """What serves the calls of a channel now."""
        return (await self.newest_serving()).channel(channel)

    async def set_adapter(self, channel: str, adapter: str, version: int) -> None:
        """Gateways hear of it last: no step of an adapter gets to a shard that does not know its version.
        PoolUnavailable if a shard is away: then calls go on with the adapter before."""
        first, *others = map(self.shards.at, await self.shards.names())
        await asyncio.gather(*(shard.set_adapter(channel, adapter, version) for shard in others))
        await first.set_adapter(channel, adapter, version)

    async def pause_channel(self, channel: str, *, paused: bool) -> None:
        await self.ask(PauseChannel(channel, paused))

    # -- watching ------------------------------------------------------------------------------------------------------

    async def stats(self) -> PoolStats:
        answer = await self.shards.ask_all(lambda shard: shard.stats())
        return merge_stats(answer.parts, answer.missing)

    async def quarantined(self) -> list[Step]:
        return [step for answer in await self.shards.call_all(lambda shard: shard.quarantined()) for step in answer]

    async def pacing(self, channel: str) -> Pacing:
        """A shard that does not answer counts with its last numbers, so that not too many rollouts are started."""
        answer = await self.shards.ask_all(lambda shard: shard.pacing(channel))
        for name, part in answer.by_shard.items():
            if part.in_flight or part.queued or part.batch:
                self._last_pacing[channel, name] = replace(part, refills=())
        away = [self._last_pacing[channel, name] for name in answer.missing if (channel, name) in self._last_pacing]
        return merge_pacing([*answer.parts, *away], (await self.shards.plan()).limits.batch_size, answer.missing)

    async def series(self, *, seconds: float) -> TimeSeries:
        """What happened in the last `seconds`. The shorter the time, the finer the intervals."""
        return await self.ask(ReadSeries(seconds), timeout=WATCH_TIMEOUT)

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        """At most about `limit`. Without cursors, from the start: all that is held and the last that are gone. A shard
        that has left the pool is reset, and has nothing more."""
        return await read_changes(self.shards, cursors, limit)

    async def preview(self, channel: str) -> BatchPreview:
        """The batch that a fetch would get now, as the channel's trainer asked for it last."""
        return await preview_batch(self.shards, channel)

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        """The steps of these (trajectory_uid, prompt_uid), in order; none for what the pool no longer holds."""
        return await read_steps(self.shards, uids)

    async def policy_status(self, channel: str = TRAIN) -> PolicyStatus:
        """Which version serves which sessions, the last decisions, and what the versions earned in that channel."""
        serving, decisions, (rewards, missing) = await asyncio.gather(
            self.shards.at(self.shards.pool, timeout=WATCH_TIMEOUT).serving(),
            self.ask(ReadDecisions(), timeout=WATCH_TIMEOUT),
            self.ask(ReadRewardTallies(channel), timeout=WATCH_TIMEOUT),
        )
        return PolicyStatus(
            policy_version=serving.policy_version,
            canary=serving.canary,
            withdrawn=serving.withdrawn,
            decisions=decisions,
            rewards=rewards,
            missing=missing,
        )

    async def curate(self, curation: Curation) -> CurationOutcome:
        return await self.ask(Curate(curation))

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> AuditPage:
        """The last decisions, newest first."""
        return await self.ask(ReadAudit(limit, trajectory_uid), timeout=WATCH_TIMEOUT)
