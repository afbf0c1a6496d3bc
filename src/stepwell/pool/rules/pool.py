"""The pool's rules over one state: who may submit what, when a group is ready, what goes first, what is dropped.

- Pure: no clock, no waiting, no Ray. The caller sets the time.
- A step is accepted once and leaves once: acknowledged, or dropped under a cause.
- The cost of an operation does not grow with the length of the queue.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import NamedTuple

from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.leasing import BatchRequest, ExactFill, Order, ReadyGroups, ShardPreview, Unit, max_per_user
from stepwell.pool.api.plan import Limits, OnDeadline, Overflow
from stepwell.pool.api.policy import Canary, PolicyDecision
from stepwell.pool.api.producing import DEADLINE, Pacing, Refill
from stepwell.pool.api.staleness import DISTANCES
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.rules.ingest import Ingest
from stepwell.pool.rules.leasing import Leasing
from stepwell.pool.rules.preview import Previewer
from stepwell.pool.rules.rewards_due import RewardsDue
from stepwell.pool.rules.sessions import Sessions
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Group
from stepwell.pool.state.slice import Slice
from stepwell.pool.state.view import PoolView

CLEARED = "cleared"
NAMED_USERS = 3
"""Users that a consumer is told by name."""


class ReadyItems(NamedTuple):
    """Groups, trajectories or steps that could be handed out."""

    ages: list[float]
    """When each was opened."""
    users: tuple[str, ...] = ()
    """The user of each item, if the pool limits users."""


class Pool:
    """Producers use `ingest`, consumers `leasing`, reward workers `rewards_due`, watchers `view`."""

    def __init__(self, limits: Limits, journal: StateJournal | None = None, slices: Sequence[type[Slice]] = ()) -> None:
        self.state = PoolState(limits, journal or StateJournal(), slices)
        self.ingest = Ingest(self.state)
        self.sessions = Sessions(self.state, self.ingest)
        self.leasing = Leasing(self.state)
        self.previewer = Previewer(self.state, self.leasing)
        self.rewards_due = RewardsDue(self.state)
        self.view = PoolView(self.state)

    def decide(self, decision: PolicyDecision, canary: Canary | None, policy_version: int | None) -> None:
        """About a version of the policy. Conflict if it was withdrawn since whoever decides has looked."""
        known = self.state.serving.canary
        has_ended = decision.action == "overdue" and (known is None or known.version != decision.version)
        if has_ended or decision in self.state.decisions:
            return
        if decision.action == "promote" and decision.version in self.state.serving.withdrawn:
            raise Conflict(f"version {decision.version} was refused or rolled back: it cannot be promoted")
        if canary is not None and not 0.0 <= canary.share <= 1.0:
            raise BadRequest(f"the share of a canary is between 0 and 1, not {canary.share}")
        is_remark = decision.action in ("refuse", "overdue")
        self.state.decide_policy(decision, known if is_remark else canary, policy_version)

    def advance(self, now: float, pool_time: float | None = None) -> None:
        """Let time pass: leases and deadlines that are over take effect. Pool time is `now` if it is not given."""
        self.state.advance(now, now if pool_time is None else pool_time)
        self.leasing.expire()
        for channel in self.state.channels.values():
            while (group := channel.overdue(self.state.pool_time)) is not None:
                self._end_deadline(group)

    def pacing(self, name: str) -> Pacing:
        channel, limits = self.state.channels.get(name), self.state.limits
        batch, most = limits.batch_size or 0, limits.max_staleness
        ahead = None if most is None else DISTANCES[limits.stale_by]().batches_ahead(most)
        if channel is None:
            return Pacing(batch=batch, batches_ahead=ahead, in_flight=0, queued=0, group_deadline=limits.group_deadline)
        return Pacing(
            batch=batch or channel.last_taken,
            batches_ahead=ahead,
            in_flight=channel.trajectories - channel.completed,
            queued=channel.completed,
            refills=tuple(Refill(g.prompt_uid, g.size - len(g.trajectories)) for g in channel.refills.values()),
            group_deadline=limits.group_deadline,
        )

    def ready_items(self, request: BatchRequest) -> ReadyItems:
        """The oldest items that could be taken, oldest first, at most as many as requested."""
        channel, count = self.state.channels.get(request.channel), request.count
        if channel is None:
            return ReadyItems([])
        if channel.unit is None:
            self.state.claim_unit(channel, request.unit)
        limit = self.leasing.user_limit(request)
        if request.unit is Unit.GROUPS:
            groups = list(takewhile(channel.is_ready, channel.oldest_groups(count, request.order, limit)))
            ages, users = [group.opened_at for group in groups], (group.user for group in groups)
        elif request.unit is Unit.STEPS:
            steps = channel.oldest_steps(count, limit)
            ages, users = [step.started_at for _, step in steps], (trajectory.user for trajectory, _ in steps)
        else:
            keys = channel.ready_trajectories.oldest(count, limit)
            trajectories = [self.state.trajectories[uid] for *_, uid in keys]
            ages, users = [found.group.opened_at for found in trajectories], (found.user for found in trajectories)
        return ReadyItems(ages, () if limit is None else tuple(users))

    def preview(self, name: str, request: BatchRequest | ExactFill | None = None) -> ShardPreview:
        """What would be handed out for this request; without one, for the last that a consumer made."""
        at, asked = self.previewer.last_request(name)
        request = request or asked
        if isinstance(request, ExactFill):
            return self.previewer.preview(request, at, inf)
        found = self.previewer.preview(request, at, self.nothing_after(request))
        return found if found.count >= request.count else replace(found, waits_for=self.waiting_for(request))

    def ready_groups(self, name: str) -> ReadyGroups:
        channel = self.state.channels.get(name)
        return ReadyGroups({} if channel is None else channel.by_size.counts())

    def clear(self, name: str) -> int:
        """Drop every group of a channel that is not under lease. Returns their number."""
        channel = self.state.channels.get(name)
        groups = [] if channel is None else list(channel.groups.values())
        for group in groups:
            self.state.drop_group(group, CLEARED)
        return len(groups)

    def nothing_after(self, request: BatchRequest) -> float:
        """In strict order, when the oldest group that is not ready was opened: younger groups must wait for it."""
        channel = self.state.channels.get(request.channel)
        unfinished = None if channel is None or request.order is not Order.STRICT else channel.oldest_unfinished()
        return inf if unfinished is None else unfinished.opened_at

    def waiting_for(self, request: BatchRequest) -> str:
        """In words, what a consumer waits for."""
        channel = self.state.channels.get(request.channel)
        wanted = f"{request.count} ready {request.unit} in channel {request.channel!r}"
        if channel is None:
            known = ", ".join(sorted(self.state.channels)) or "none"
            return f"{wanted}, which has never had any (channels: {known})"
        text = f"{wanted}; {len(channel.ready)} ready of {len(channel)} groups held{self._leased(channel)}"
        if channel.ledger.left_out:
            kinds = ", ".join(f"{count.steps} {kind}" for kind, count in sorted(channel.ledger.left_out.items()))
            text += f"; steps left out so far: {kinds}"
        text += self._held_back(channel, request)
        group = channel.oldest_unfinished()
        if group is None:
            return text
        unscored = sum(not trajectory.is_scored() for trajectory in group.trajectories.values())
        rewards = f", {unscored} without a reward" if self.state.limits.require_reward else ""
        strict = " and nothing may overtake it" if request.order is Order.STRICT else ""
        return (
            f"{text}; the oldest unfinished group, {group.prompt_uid!r}, has {group.completed} of {group.size} "
            f"trajectories complete and {len(group.trajectories)} started{rewards}{strict}"
        )

    def stats(self) -> PoolStats:
        return self.state.stats()

    def _leased(self, channel: Channel) -> str:
        """In words, what consumers have and the pool still keeps for them."""
        if not channel.leased_groups:
            return ""
        text = f", {channel.leased_groups} more leased and not acknowledged"
        if self.state.limits.overflow is not Overflow.REFUSE or channel.has_room():
            return text
        return (
            f"{text}: with these the channel is full, and new trajectories are refused. A trainer acknowledges when it "
            "saves a checkpoint: let it save more often, or give the pool more room (--max-queue-size, --max-bytes)"
        )

    def _held_back(self, channel: Channel, request: BatchRequest) -> str:
        """In words, what is ready and is not taken because there is already enough of its user."""
        limit, share = self.leasing.user_limit(request), self.state.limits.max_share_per_user
        held_back = {} if limit is None else channel.held_back(limit)
        if share is None or not held_back:
            return ""
        first = sorted(held_back, key=lambda user: (-held_back[user], user))[:NAMED_USERS]
        named = ", ".join(f"{held_back[user]} of user {user!r}" for user in first)
        others = f" and {len(held_back) - len(first)} more users" if len(held_back) > len(first) else ""
        return (
            f"; {sum(held_back.values())} ready {request.unit} are held back by --max-share-per-user {share:g}, which "
            f"allows {max_per_user(share, request.count)} of one user in a batch of {request.count}: {named}{others}"
        )

    def _end_deadline(self, group: Group) -> None:
        """What took too long is a failure of the policy: without it the others would look worse than they are, and
        nothing would teach to be shorter."""
        limits = self.state.limits
        if limits.on_deadline is not OnDeadline.DROP and limits.unfinished_reward is not None:
            self.ingest.end_unfinished(group, limits.unfinished_reward)
            if self.state.channel_of(group).overdue(self.state.pool_time) is not group:
                return  # it is complete
        finished = [
            trajectory
            for trajectory in group.trajectories.values()
            if trajectory.completed and (trajectory.is_scored() or not limits.require_reward)
        ]
        if limits.on_deadline is OnDeadline.REFILL:
            wait_until = self.state.pool_time + (limits.group_deadline or 0.0)
            self.state.trim_group(group, finished, DEADLINE, wait_until=wait_until)
        elif limits.on_deadline is OnDeadline.PARTIAL and len(finished) >= max(1, limits.min_group_size):
            self.state.trim_group(group, finished, DEADLINE, wait_until=None)
        else:
            self.state.drop_group(group, DEADLINE)
