"""The pool's rules: who may submit what, when a group is ready, what goes first, what is dropped.

Pure: no clock, no waiting, no Ray; whoever drives it tells it the time. What always holds: a step is accepted once and
leaves once, acknowledged or dropped under a cause; a trajectory belongs to one group, a group to one channel; the cost
of an operation does not grow with what is queued.
"""

from itertools import takewhile
from math import inf

from stepwell.pool.api.leasing import BatchRequest, Order, ReadyGroups, Unit
from stepwell.pool.api.pacing import Pacing, Refill
from stepwell.pool.api.plan import Limits, OnDeadline
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.rules.curation import Curator
from stepwell.pool.rules.ingest import Ingest
from stepwell.pool.rules.leasing import Leasing
from stepwell.pool.rules.rewards_due import RewardsDue
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.journal import NoJournal, StateJournal
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Group
from stepwell.pool.state.view import PoolView


class Pool:
    """Producers go through `ingest`, consumers through `leasing`, reward workers through `rewards_due`, people through
    `curator`, and whoever only looks through `view`."""

    def __init__(self, limits: Limits, journal: StateJournal | None = None) -> None:
        self.state = PoolState(limits, journal or NoJournal())
        self.ingest = Ingest(self.state)
        self.leasing = Leasing(self.state)
        self.rewards_due = RewardsDue(self.state)
        self.curator = Curator(self.state)
        self.view = PoolView(self.state, self.ingest.quarantine)

    @property
    def policy_version(self) -> int:
        return self.state.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.state.policy_version = version

    def advance(self, now: float) -> None:
        """Let time pass: leases and deadlines that are over take effect."""
        self.state.now = self.state.chronicle.now = now
        self.state.timeline.tick(now)
        self.leasing.expire()
        self.rewards_due.expire()
        for channel in self.state.channels.values():
            while (first := channel.deadlines.first()) is not None and first[0] <= now:
                self._deadline(channel, channel.groups[first[1]])

    def pacing(self, name: str) -> Pacing:
        channel, limits = self.state.channels.get(name), self.state.limits
        batch, ahead = limits.batch_size or 0, 1 + (limits.max_staleness or 0)
        if channel is None:
            return Pacing(batch=batch, batches_ahead=ahead, in_flight=0, queued=0)
        return Pacing(
            batch=batch or channel.last_taken,
            batches_ahead=ahead,
            in_flight=channel.trajectories - channel.completed,
            queued=channel.completed,
            refills=tuple(Refill(g.prompt_uid, g.size - len(g.trajectories)) for g in channel.refills.values()),
        )

    def ready_ages(self, wanted: BatchRequest) -> list[float]:
        """When the oldest that could be taken were opened, oldest first: as many as there are, up to what is wanted."""
        channel, count = self.state.channels.get(wanted.channel), wanted.count
        if channel is None:
            return []
        if channel.unit is None:
            channel.consume_by(wanted.unit)
        if wanted.unit is Unit.GROUPS:
            keys = (channel.by_age if wanted.order is Order.STRICT else channel.ready).smallest(count)
            first = list(takewhile(lambda key: key in channel.ready, keys))
            return [channel.groups[seq].opened_at for _, seq in first]
        if wanted.unit is Unit.STEPS:
            return [channel.step(number)[1].started_at for (number,) in channel.ready_steps.smallest(count)]
        complete = channel.ready_trajectories.smallest(count)
        return [self.state.trajectories[uid].group.opened_at for *_, uid in complete]

    def backlog(self, name: str) -> ReadyGroups:
        channel = self.state.channels.get(name)
        return ReadyGroups({} if channel is None else channel.shelves.counts())

    def clear(self, name: str) -> int:
        """Drop every group of a channel that is not under lease; gives how many there were."""
        channel = self.state.channels.get(name)
        return 0 if channel is None else self.state.clear(channel)

    def nothing_after(self, wanted: BatchRequest) -> float:
        """In strict order, when the oldest group that is not ready was opened: what is younger must wait for it."""
        channel = self.state.channels.get(wanted.channel)
        unfinished = None if channel is None or wanted.order is not Order.STRICT else channel.oldest_unfinished()
        return inf if unfinished is None else unfinished.opened_at

    def waiting_for(self, wanted: BatchRequest) -> str:
        """In words, what a consumer waits for."""
        channel = self.state.channels.get(wanted.channel)
        if channel is None:
            known = ", ".join(sorted(self.state.channels)) or "none"
            return (
                f"{wanted.count} ready {wanted.unit} in channel {wanted.channel!r}, which has never had any "
                f"(channels: {known})"
            )
        text = (
            f"{wanted.count} ready {wanted.unit} in channel {wanted.channel!r}; {len(channel.ready)} ready of "
            f"{len(channel)} groups held"
        )
        if channel.ledger.left_out:
            kinds = ", ".join(f"{tally.steps} {kind}" for kind, tally in sorted(channel.ledger.left_out.items()))
            text += f"; steps left out so far: {kinds}"
        group = channel.oldest_unfinished()
        if group is None:
            return text
        unscored = sum(not trajectory.is_scored() for trajectory in group.trajectories.values())
        rewards = f", {unscored} without a reward" if self.state.limits.require_reward else ""
        strict = " and nothing may overtake it" if wanted.order is Order.STRICT else ""
        return (
            f"{text}; the oldest unfinished group, {group.prompt_uid!r}, has {group.completed} of {group.size} "
            f"trajectories complete and {len(group.trajectories)} started{rewards}{strict}"
        )

    def stats(self) -> PoolStats:
        counters = self.state.counters
        return PoolStats(
            policy_version=self.policy_version,
            channels={name: channel.stats() for name, channel in self.state.channels.items()},
            submitted=counters.submitted,
            refused=counters.refused.copy(),
            quarantined=counters.quarantined.copy(),
            leases=len(self.leasing.leases),
            forks=counters.forks,
            scoring=self.rewards_due.stats(),
        )

    def _deadline(self, channel: ChannelIndex, group: Group) -> None:
        limits = self.state.limits
        finished = [
            trajectory
            for trajectory in group.trajectories.values()
            if trajectory.completed and (trajectory.is_scored() or not limits.require_reward)
        ]
        if limits.on_deadline is OnDeadline.REFILL:
            self._drop_unfinished(channel, group, limits)
            group.deadline = self.state.now + (limits.group_deadline or 0.0)
            channel.enter(group)
            channel.place(group)
            channel.refills[group.seq] = group
        elif limits.on_deadline is OnDeadline.PARTIAL and len(finished) >= max(1, limits.min_group_size):
            self._drop_unfinished(channel, group, limits)
            group.give_up(group.size - len(group.trajectories))
            group.deadline = None
            channel.enter(group)
        else:
            self.state.drop_group(group, "deadline")
            return
        self.state.journal.save_group(group)

    def _drop_unfinished(self, channel: ChannelIndex, group: Group, limits: Limits) -> None:
        """Out of the queue, and out of the group whoever is not done."""
        channel.leave(group)
        for trajectory in list(group.trajectories.values()):
            if not trajectory.completed or (limits.require_reward and not trajectory.is_scored()):
                channel.ledger.drop("deadline", trajectory.held_steps())
                del group.trajectories[trajectory.uid]
                group.nbytes -= sum(step.nbytes for step in trajectory.steps.values())
                self.state.journal.remove_trajectory(trajectory)
                self.state.close(trajectory, TrajectoryState.DROPPED, "deadline")
