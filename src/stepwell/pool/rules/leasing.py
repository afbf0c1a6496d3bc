"""What consumers do: take ready data under a lease, acknowledge it, or let it return.

- Handed-out data is handed out again only if its lease expired or was given back. Then it is the oldest and goes first.
- A consumer gets only the steps that its filter accepts. The rest of a group goes where the group goes; its rewards are
  told. A group, trajectory or step of which the filter accepts nothing leaves the queue as if it were acknowledged, at
  the fetch that meets it.
- With max_share_per_user, a batch has at most that share of one user. More of that user stay in the queue, and later
  ones of others are taken; a batch is not filled up with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.leasing import (
    DECISION,
    BatchRequest,
    ExactFill,
    GroupOffer,
    LeasedGroups,
    Settlement,
    Unit,
    UserLimit,
    batch_of_lease,
    is_live,
    is_reward_lease,
    max_per_user,
)
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.staleness import consequence_of
from stepwell.pool.rules.batch_selection import BatchSelection, accepted_trajectories
from stepwell.pool.rules.exact_batch import choose_groups
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.shipment import (
    TokenMask,
    group_rows,
    later_rewards,
    left_out_of,
    own_mask,
    ship,
    step_rows,
)
from stepwell.steps.trainable import StepFilter

DOUBT = 5.0
"""Seconds until the coordinator of an expired lease is asked again."""
MAX_ACKNOWLEDGED = 100_000
"""Batches of several shards that a shard has acknowledged as their coordinator, and of which other shards may still
have a part. Each takes about 100 bytes."""


class Leasing:
    def __init__(self, state: PoolState) -> None:
        self._state = state
        self.doubtful: dict[str, None] = {}
        """Leases that have expired, and whose coordinators must be asked whether they are acknowledged."""
        self._staleness = consequence_of(state.limits)
        self._selection = BatchSelection(state)
        self.last_requests: dict[str, tuple[float, BatchRequest | ExactFill]] = {}
        """By channel: when a consumer asked for a batch last, and for which."""

    def take(self, request: BatchRequest, lease_uid: str, expires_at: float) -> LeasedGroups | None:
        """The requested data under a lease of that name; None while there is not enough.

        The same call again gives the same data: an answer may be lost on its way.
        """
        if lease_uid in self._state.leases:
            return self._shipment(self._state.leases[lease_uid], [])
        channel = self._state.channels.get(request.channel)
        if channel is None:
            return None
        if self._state.limits.trained_models:
            request = replace(request, models=self._state.limits.trained_models)
        self.check(request)
        lease = Lease(lease_uid, channel.name, expires_at, request.step_filter)
        history, limit = self._selection.history(channel, request, self.user_limit(request))
        if request.unit is Unit.STEPS:
            steps = self._selection.steps(channel, request, limit)
            if len(steps) < request.count:
                return None
            lease.steps.extend(steps)
        else:
            fresh = request.count - len(history)
            if request.unit is Unit.GROUPS:
                groups = self._selection.groups(channel, request, fresh, limit)
            else:
                groups = self._split_off(self._selection.trajectories(channel, request, fresh, limit), fresh)
            if len(groups) < fresh:
                return None
            lease.groups.extend(groups)
        self._state.lease_out(lease)
        return self._shipment(lease, history)

    def check(self, request: BatchRequest) -> None:
        """BadRequest or Conflict if its channel can never answer it."""
        channel = self._state.channels.get(request.channel)
        if channel is None:
            return
        if request.history and request.unit is not Unit.GROUPS:
            raise BadRequest(f"history is kept by groups; a batch of {request.unit} cannot mix it in")
        self._claim(channel, request.unit)
        self.last_requests[channel.name] = (self._state.now, request)

    def filter_of(self, request: BatchRequest | ExactFill) -> StepFilter:
        """Which steps a consumer gets."""
        return replace(request.step_filter, models=self._state.limits.trained_models)

    def user_limit(self, request: BatchRequest) -> UserLimit | None:
        """None if the pool limits no user."""
        share = self._state.limits.max_share_per_user
        if share is None:
            return None
        most = max_per_user(share, request.count) if request.max_per_user is None else request.max_per_user
        return UserLimit(most, request.user_rooms)

    def offers(self, request: ExactFill, shard: str = "") -> list[GroupOffer]:
        """The groups that could be part of the oldest such batch, whatever is queued."""
        channel = self._state.channels.get(request.channel)
        if channel is None:
            return []
        self._claim(channel, Unit.GROUPS)
        self.last_requests[channel.name] = (self._state.now, request)
        limited = self._state.limits.max_share_per_user is not None
        return [
            GroupOffer(shard, group.seq, group.age, group.opened_at, size, group.source, group.user if limited else "")
            for group, size in self._selection.offered(channel, request.trajectories, self.filter_of(request))
        ]

    def take_offers(
        self, request: ExactFill, offers: Sequence[GroupOffer], lease_uid: str, expires_at: float
    ) -> LeasedGroups | None:
        """These groups under a lease of that name; None if one of them is no longer as it was offered.

        The same call again gives the same data, as in `take`.
        """
        if lease_uid in self._state.leases:
            return self._shipment(self._state.leases[lease_uid], [])
        channel = self._state.channels.get(request.channel)
        step_filter = self.filter_of(request)
        groups = [] if channel is None else [channel.groups[o.seq] for o in offers if o.seq in channel.groups]
        if channel is None or len(groups) < len(offers):
            return None
        for offer, group in zip(offers, groups, strict=True):
            if not channel.is_ready(group) or self._selection.refuse_group(channel, group, step_filter):
                return None
            if accepted_trajectories(group, step_filter) != offer.size:
                return None
        lease = Lease(lease_uid, channel.name, expires_at, step_filter, groups)
        self._state.lease_out(lease)
        return self._shipment(lease, [])

    def fill(self, request: ExactFill, lease_uid: str, expires_at: float) -> LeasedGroups | None:
        """An exact batch of this pool's groups under a lease of that name; None if there is none.

        The same call again gives the same data, as in `take`.
        """
        if lease_uid in self._state.leases:
            return self._shipment(self._state.leases[lease_uid], [])
        share = self._state.limits.max_share_per_user
        chosen = choose_groups(self.offers(request), request.trajectories, request.shares, share)
        return None if chosen is None else self.take_offers(request, chosen, lease_uid, expires_at)

    def ack(self, lease_uid: str) -> Settlement:
        """The data is trained: it leaves the pool. The name of a decision: so are all parts of that batch."""
        lease = self._state.leases.get(lease_uid)
        if lease is None:
            return self._ended(lease_uid, Settlement.DONE)
        self._state.mark_trained(lease)
        return Settlement.DONE

    def nack(self, lease_uid: str, *, attempted: bool = True) -> Settlement:
        """The data is not trained: it goes back to the head of its queue. It may count as an attempt or not. The name
        of a decision: no part of that batch is acknowledged, unless all are."""
        lease = self._state.leases.get(lease_uid)
        if lease is None:
            return self._ended(lease_uid, Settlement.EXPIRED)
        self._return(lease, Settlement.DONE, attempted=attempted)
        return Settlement.DONE

    def end_silent(self, lease_uids: Iterable[str]) -> None:
        """The holders of these leases are dead: their data returns."""
        for uid in lease_uids:
            if uid in self._state.leases:
                self._return(self._state.leases[uid], Settlement.EXPIRED, attempted=True)

    def expire(self) -> None:
        """Return the data of expired leases. Those that are prepared end as their coordinators say."""
        while (lease := self._state.expired_lease()) is not None:
            if lease.is_prepared:
                self.doubtful[lease.uid] = None
                self._state.extend_lease(lease, self._state.pool_time + DOUBT)
            else:
                self._return(lease, Settlement.EXPIRED, attempted=True)

    def prepare(self, lease_uids: Iterable[str]) -> None:
        """Their holder is about to acknowledge them with other parts of their batches."""
        for lease in filter(None, map(self._state.leases.get, lease_uids)):
            self._state.prepare_lease(lease)

    def take_doubtful(self, silent: Iterable[str]) -> list[str]:
        """Returns the leases that end as their coordinators say, among expired leases and those with silent holders."""
        found = {**self.doubtful, **dict.fromkeys(silent)}
        self.doubtful.clear()
        return [uid for uid in found if uid in self._state.leases and self._state.leases[uid].is_prepared]

    def settle(self, decision_uid: str) -> None:
        """All shards have ended their parts of that batch: none of them asks for the decision any more."""
        if decision_uid in self._state.acknowledged:
            self._state.settle(decision_uid)

    def _ended(self, lease_uid: str, wanted: Settlement) -> Settlement:
        """How a lease ended. Over a batch, the first call decides."""
        if lease_uid in self._state.acknowledged:
            return Settlement.DONE
        if lease_uid.endswith(DECISION) and lease_uid not in self._state.ended_leases:
            return self._decide(lease_uid, wanted)
        return self._state.ended_leases.get(lease_uid, Settlement.UNKNOWN)

    def _decide(self, decision_uid: str, wanted: Settlement) -> Settlement:
        """Decides how a batch ends. This shard is the batch's coordinator, and has a part of it.

        - An acknowledgement is kept until the holder says that all shards have ended their parts. If the holder dies
          before that, it is kept for good: a shard may be away for any time, and must not hand out its part again.
        - The opposite need not be kept. It returns the coordinator's own part, and without that part a batch is not
          acknowledged any more.
        - Beyond MAX_ACKNOWLEDGED, batches are refused: their data returns, and nothing is trained twice. It takes so
          many trainers that died within an acknowledgement.
        """
        batch_uid = decision_uid.removesuffix(DECISION)
        own = next((lease for lease in self._state.leases.values() if batch_of_lease(lease.uid) == batch_uid), None)
        if own is None or len(self._state.acknowledged) >= MAX_ACKNOWLEDGED:
            wanted = Settlement.EXPIRED
        if own is not None and wanted is Settlement.EXPIRED:
            self._return(own, Settlement.EXPIRED, attempted=True)
        self._state.decide(decision_uid, wanted)
        return wanted

    def _claim(self, channel: Channel, unit: Unit) -> None:
        """The first request decides what its channel is consumed by."""
        if channel.unit is None:
            self._state.claim_unit(channel, unit)
        elif channel.unit is not unit:
            raise Conflict(f"channel {channel.name!r} is consumed by {channel.unit}, not by {unit}")

    def _split_off(self, trajectories: Sequence[Trajectory], count: int) -> list[Group]:
        """Each as a group of its own; none if there are fewer than `count`."""
        return [] if len(trajectories) < count else [self._state.split_off(found) for found in trajectories]

    def _return(self, lease: Lease, how: Settlement, *, attempted: bool) -> None:
        self._state.return_leased(lease, how, attempted=attempted)
        if self._state.limits.overflow is Overflow.DROP_OLDEST:
            self._state.evict(self._state.channels[lease.channel])

    # -- what a consumer gets ------------------------------------------------------------------------------------------

    def _token_mask(self, channel: str, groups: Iterable[Group]) -> TokenMask:
        if self._state.limits.max_staleness is None:
            return own_mask
        mask = partial(self._staleness.token_mask, present=self._state.present(channel))
        groups = groups if self._state.keepers else ()
        kept = {id(step) for group in groups if self._state.why_kept(group) for step in group.held_steps()}
        return (lambda step: step.mask if id(step) in kept else mask(step)) if kept else mask

    def _shipment(self, lease: Lease, history: Sequence[Group]) -> LeasedGroups:
        if lease.steps:
            return self._shipped_steps(lease)
        groups = [*lease.groups, *history]
        rows_by_group = [group_rows(group, lease.step_filter.accepts) for group in groups]
        return LeasedGroups(
            columns=ship(list(chain(*rows_by_group)), self._token_mask(lease.channel, groups)),
            group_sizes=[len(rows) for rows in rows_by_group],
            opened_at=[group.opened_at for group in groups],
            attempts=[group.attempts for group in groups],
            from_history=[group.trained for group in groups],
            sources=[group.source for group in groups],
            left_out=left_out_of(groups, rows_by_group),
        )

    def _shipped_steps(self, lease: Lease) -> LeasedGroups:
        rows = step_rows(lease.steps, lease.step_filter.accepts)
        mask = self._token_mask(lease.channel, (row.trajectory.group for row in rows))
        return LeasedGroups(
            columns=ship(rows, mask, separate=True),
            group_sizes=[1] * len(rows),
            opened_at=[row.step.started_at for row in rows],
            attempts=[0] * len(rows),
            from_history=[False] * len(rows),
            sources=[row.trajectory.group.source for row in rows],
            left_out=later_rewards(rows),
        )


EXTENSION = 60.0
"""Seconds to which a heartbeat renews a lease, if less than half of them is left: not every heartbeat is journaled."""


class LeaseHeartbeats:
    def __init__(self, state: PoolState, timeout: float) -> None:
        """`timeout` is the time in seconds after which a silent holder is taken for dead."""
        self._state = state
        self._timeout = timeout
        self._elapsed = 0.0
        self._heard: dict[str, float] = {}
        """When each lease was last named."""

    def renew(self, lease_uids: Sequence[str]) -> list[Settlement | None]:
        """The holder of these leases is alive. For each: None if it still holds it, else how the lease ended."""
        return [self._renew(uid) for uid in lease_uids]

    def pass_time(self, seconds: float) -> list[str]:
        """Returns the leases whose holders are silent."""
        self._elapsed += seconds
        live = [uid for uid in (*self._state.leases, *self._state.reward_leases) if is_live(uid)]
        self._heard = {uid: self._heard.get(uid, self._elapsed) for uid in live}
        return [uid for uid, heard in self._heard.items() if self._elapsed - heard >= self._timeout]

    def _renew(self, uid: str) -> Settlement | None:
        lease = self._state.leases.get(uid)
        if is_reward_lease(uid) and uid not in self._state.reward_leases:
            return Settlement.DONE
        if lease is None and not is_reward_lease(uid):
            return self._state.ended_leases.get(uid, Settlement.UNKNOWN)
        self._heard[uid] = self._elapsed
        if lease is not None and lease.expires_at < self._state.pool_time + EXTENSION / 2:
            self._state.extend_lease(lease, self._state.pool_time + EXTENSION)
        return None
