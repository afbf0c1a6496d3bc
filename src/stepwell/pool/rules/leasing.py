"""What consumers do: take what is ready under a lease, acknowledge it, or let it come back.

What always holds: what was handed out is handed out again only if its lease expired or was given back; then it is the
oldest there is and goes first. A consumer gets only what passes its filter: the rest of a group goes where the group
goes, and a group (trajectory, step) of which nothing passes goes as if it had been acknowledged, when it is come upon.
Where rewards are required, no rollout goes whose only rewards are on steps that do not pass: it waits for another.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.leasing import BatchRequest, GroupOffer, LeasedGroups, Order, Settlement, Unit
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.rules.exact_batch import choose_groups
from stepwell.pool.rules.staleness import is_stale, oldest_trained, oldest_version, trained_mask
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.priority_set import PrioritySet
from stepwell.pool.state.ready_by_size import SizeBucket
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.shipment import group_rows, ship, trajectory_rows
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import BoolArray
from stepwell.steps.step_filter import StepFilter

ENDED_KEPT = 10_000
"""How many ended leases are remembered, to tell an expired one from one that was acknowledged before."""


class Leasing:
    def __init__(self, books: PoolState) -> None:
        self.leases: dict[str, Lease] = {}
        self._books = books
        self._expiry: PrioritySet[tuple[float, str]] = PrioritySet()
        self.ended: OrderedDict[str, Settlement] = OrderedDict()
        """The last leases that are over, and how they ended."""

    def take(self, wanted: BatchRequest, lease_uid: str, expires_at: float) -> LeasedGroups | None:
        """What is wanted, under a lease of that name; None while there is not enough.

        Asking again under the same name gives the same again: an answer may be lost on its way.
        """
        if lease_uid in self.leases:
            return self._shipment(self.leases[lease_uid], [])
        channel = self._books.channels.get(wanted.channel)
        if channel is None:
            return None
        if wanted.history and wanted.unit is not Unit.GROUPS:
            raise BadRequest(f"history is kept by groups; a batch of {wanted.unit} cannot mix it in")
        self._claim(channel, wanted.unit)
        lease = Lease(lease_uid, channel.name, expires_at, wanted.step_filter)
        drawn = channel.draw_history(round(wanted.count * wanted.history))
        old = [group for group in drawn if _has_any(group.held_steps(), lease.step_filter)]
        if wanted.unit is Unit.STEPS:
            lease.steps = self._choose_steps(channel, wanted)
            enough = len(lease.steps) == wanted.count
        else:
            fresh = wanted.count - len(old)
            choose_groups = self._choose_groups if wanted.unit is Unit.GROUPS else self._choose_trajectories
            lease.groups = choose_groups(channel, wanted, fresh)
            enough = len(lease.groups) == fresh
        if not enough:
            return None
        self._begin(lease, channel)
        return self._shipment(lease, old)

    def offers(self, name: str, trajectories: int, step_filter: StepFilter, shard: str = "") -> list[GroupOffer]:
        """The groups among which are the oldest that fill a batch of so many trajectories, whatever is queued."""
        channel = self._books.channels.get(name)
        if channel is None:
            return []
        self._claim(channel, Unit.GROUPS)
        groups = [
            group for shelf in channel.shelves for group in self._oldest_of(channel, shelf, trajectories, step_filter)
        ]
        sized = ((group, _wanted_trajectories(group, step_filter)) for group in groups)
        return [
            GroupOffer(shard, group.seq, group.age, group.opened_at, size, group.source)
            for group, size in sized
            if size <= trajectories
        ]

    def take_offers(
        self, name: str, offers: Sequence[GroupOffer], step_filter: StepFilter, lease_uid: str, expires_at: float
    ) -> LeasedGroups | None:
        """These groups, under a lease of that name; None if one of them is not to be had any more as it was offered.

        Asking again under the same name gives the same again, as in `take`.
        """
        if lease_uid in self.leases:
            return self._shipment(self.leases[lease_uid], [])
        channel = self._books.channels.get(name)
        groups = [] if channel is None else [channel.groups[o.seq] for o in offers if o.seq in channel.groups]
        if channel is None or len(groups) < len(offers):
            return None
        for offer, group in zip(offers, groups, strict=True):
            if group.key not in channel.ready or self._passes_over(channel, group, step_filter):
                return None
            if _wanted_trajectories(group, step_filter) != offer.size:
                return None
        lease = Lease(lease_uid, channel.name, expires_at, step_filter, groups)
        self._begin(lease, channel)
        return self._shipment(lease, [])

    def fill(
        self,
        name: str,
        trajectories: int,
        shares: Mapping[str, float],
        step_filter: StepFilter,
        lease_uid: str,
        expires_at: float,
    ) -> LeasedGroups | None:
        """The groups that `choose` chooses of what is on offer, under a lease of that name; None if there are none.

        Asking again under the same name gives the same again, as in `take`.
        """
        if lease_uid in self.leases:
            return self._shipment(self.leases[lease_uid], [])
        chosen = choose_groups(self.offers(name, trajectories, step_filter), trajectories, shares)
        return None if chosen is None else self.take_offers(name, chosen, step_filter, lease_uid, expires_at)

    def ack(self, lease_uid: str) -> Settlement:
        """The data was trained: it is the pool's no more."""
        lease = self._end(lease_uid, Settlement.DONE)
        if lease is None:
            return self.ended.get(lease_uid, Settlement.UNKNOWN)
        channel = self._books.channels[lease.channel]
        for group in lease.groups:
            channel.take_back(group)
            self._to_history(channel, group, lease.step_filter, lease.version)
        for trajectory, step in lease.steps:
            self._settle_step(channel, trajectory, step, lease.step_filter)
        return Settlement.DONE

    def nack(self, lease_uid: str, *, attempted: bool = True) -> Settlement:
        """The data was not trained: it goes back to the head of its queue. It need not count as an attempt."""
        lease = self._end(lease_uid, Settlement.DONE)
        if lease is None:
            return self.ended.get(lease_uid, Settlement.UNKNOWN)
        self._give_back(lease, attempted=attempted)
        return Settlement.DONE

    def expire(self) -> None:
        """Give back what is under leases whose time is up."""
        while (first := self._expiry.first()) is not None and first[0] <= self._books.now:
            lease = self._end(first[1], Settlement.EXPIRED)
            if lease is not None:
                self._give_back(lease)

    def restore(self, lease: Lease) -> None:
        """A lease from before a restart."""
        self.leases[lease.uid] = lease
        self._expiry.add((lease.expires_at, lease.uid))

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _claim(self, channel: ChannelIndex, unit: Unit) -> None:
        if channel.unit is None:
            channel.consume_by(unit)
        elif channel.unit is not unit:
            raise Conflict(f"channel {channel.name!r} is consumed by {channel.unit}, not by {unit}")

    def _choose_groups(self, channel: ChannelIndex, wanted: BatchRequest, count: int) -> list[Group]:
        """Fewer than `count` if there are fewer. What is stale or left out altogether goes when it is come upon."""
        step_filter = wanted.step_filter
        while True:
            keys = (channel.by_age if wanted.order is Order.STRICT else channel.ready).smallest(count)
            groups = [channel.groups[seq] for _, seq in keys]
            gone = [group for group in groups if self._passes_over(channel, group, step_filter)]
            if not gone:
                return [group for group in groups if group.key in channel.ready]

    def _oldest_of(
        self, channel: ChannelIndex, shelf: SizeBucket, trajectories: int, step_filter: StepFilter
    ) -> list[Group]:
        """As many of a shelf as could be used; more where the filter takes something out of them, for then they are
        smaller than their shelf says."""
        count = trajectories // shelf.size
        while True:
            groups = [channel.groups[seq] for _, seq in shelf.smallest(count)]
            gone = [group for group in groups if self._passes_over(channel, group, step_filter)]
            if gone:
                continue
            if all(_wanted_trajectories(group, step_filter) == shelf.size for group in groups) or count == trajectories:
                return groups
            count = trajectories

    def _passes_over(self, channel: ChannelIndex, group: Group, step_filter: StepFilter) -> bool:
        if group.key in channel.ready and not _has_any(group.held_steps(), step_filter):
            self._leave_out(channel, group, step_filter)
            return True
        if self._is_stale(filter(step_filter.accepts, group.held_steps())):
            self._books.drop_group(group, "stale", self._how_stale(group.held_steps()))
            return True
        if not self._books.limits.require_reward or group.key not in channel.ready:
            return False
        unscored = [t for t in group.trajectories.values() if self._would_go_unscored(t, step_filter)]
        for trajectory in unscored:
            self._books.hold_back(trajectory)
        return bool(unscored)

    def _choose_trajectories(self, channel: ChannelIndex, wanted: BatchRequest, count: int) -> list[Group]:
        """Each as a group of its own; none if there are fewer than `count`."""
        step_filter = wanted.step_filter
        while True:
            chosen = [self._books.trajectories[key[3]] for key in channel.ready_trajectories.smallest(count)]
            gone = [
                trajectory for trajectory in chosen if self._passes_over_trajectory(channel, trajectory, step_filter)
            ]
            if not gone:
                return [self._alone(channel, trajectory) for trajectory in chosen] if len(chosen) == count else []

    def _passes_over_trajectory(self, channel: ChannelIndex, trajectory: Trajectory, step_filter: StepFilter) -> bool:
        if not _has_any(trajectory.held_steps(), step_filter):
            self._leave_out(channel, self._alone(channel, trajectory), step_filter)
            return True
        if self._is_stale(filter(step_filter.accepts, trajectory.held_steps())):
            self._books.shrink(trajectory.group)
            self._books.drop_trajectory(trajectory, "stale", self._how_stale(trajectory.held_steps()))
            return True
        if self._would_go_unscored(trajectory, step_filter):
            self._books.hold_back(trajectory)
            return True
        return False

    def _choose_steps(self, channel: ChannelIndex, wanted: BatchRequest) -> list[tuple[Trajectory, StoredStep]]:
        step_filter = wanted.step_filter
        while True:
            chosen = [channel.step(number) for (number,) in channel.ready_steps.smallest(wanted.count)]
            gone = [
                step for trajectory, step in chosen if self._passes_over_step(channel, trajectory, step, step_filter)
            ]
            if not gone:
                return chosen

    def _passes_over_step(
        self, channel: ChannelIndex, trajectory: Trajectory, step: StoredStep, step_filter: StepFilter
    ) -> bool:
        if not step_filter.accepts(step):
            self._settle_step(channel, trajectory, step, step_filter)
            return True
        if self._is_stale((step,)):
            channel.ledger.drop("stale", (step,))
            self._lay_down(channel, trajectory, step)
            return True
        if step.reward is None and self._would_go_unscored(trajectory, step_filter):
            self._books.hold_back(trajectory)
            return True
        return False

    def _would_go_unscored(self, trajectory: Trajectory, step_filter: StepFilter) -> bool:
        """Are the rewards it has, if it must have any, all on steps that this consumer leaves out?"""
        if trajectory.reward is not None or not self._books.limits.require_reward:
            return False
        counts = (step for step in trajectory.scored_steps() if step_filter.rejection_kind(step) is None)
        return _has_any(trajectory.held_steps(), step_filter) and not any(counts)

    def _leave_out(self, channel: ChannelIndex, group: Group, step_filter: StepFilter) -> None:
        channel.leave(group)
        self._to_history(channel, group, step_filter, self._books.policy_version)

    def _is_stale(self, steps: Iterable[StoredStep]) -> bool:
        return is_stale(steps, self._books.limits, self._books.policy_version)

    def _how_stale(self, steps: Iterable[StoredStep]) -> str:
        behind = self._books.policy_version - (oldest_version(steps) or 0)
        return f"the oldest token was {behind} versions behind"

    def _token_mask(self, step: StoredStep) -> BoolArray | None:
        return trained_mask(step, oldest_trained(self._books.limits, self._books.policy_version))

    def _alone(self, channel: ChannelIndex, trajectory: Trajectory) -> Group:
        """A complete trajectory as a group of its own, so that it can go while its group waits for the others."""
        group = trajectory.group
        if group.size == 1:
            return group
        self._books.shrink(group)
        self._books.take_out(trajectory)
        self._books.counters.opened += 1
        seq = self._books.counters.opened
        alone = Group(seq, group.age, group.prompt_uid, channel.name, 1, group.opened_at, source=group.source)
        alone.nbytes = sum(step.nbytes for step in trajectory.steps.values())
        channel.enter(alone)
        self._books.join(alone, trajectory)
        channel.completed += 1
        return alone

    # -- handing out and back ------------------------------------------------------------------------------------------

    def _begin(self, lease: Lease, channel: ChannelIndex) -> None:
        for group in lease.groups:
            channel.leave(group)
            channel.lend(group)
            group.lease = lease.uid
            self._books.chronicle.touch_all(group.trajectories.values())
            self._books.journal.save_group(group)
        for trajectory, step in lease.steps:
            channel.hide_step(step)
            step.lease = lease.uid
            self._books.chronicle.touch(trajectory)
            self._books.journal.save_step(step)
        lease.version = self._books.policy_version
        channel.last_taken = sum(len(group.trajectories) for group in lease.groups) or len(lease.steps)
        self._books.journal.save_lease(lease)
        self.restore(lease)

    def _shipment(self, lease: Lease, old: list[Group]) -> LeasedGroups:
        if lease.steps:
            rows = [
                row
                for trajectory, step in lease.steps
                for row in trajectory_rows(trajectory, lease.step_filter.accepts)
                if row.step is step
            ]
            return LeasedGroups(
                columns=ship(rows, self._token_mask, separate=True),
                group_sizes=[1] * len(rows),
                opened_at=[row.step.started_at for row in rows],
                attempts=[0] * len(rows),
                from_history=[False] * len(rows),
                sources=[row.trajectory.group.source for row in rows],
            )
        groups = [*lease.groups, *old]
        parcels = [group_rows(group, lease.step_filter.accepts) for group in groups]
        return LeasedGroups(
            columns=ship([row for parcel in parcels for row in parcel], self._token_mask),
            group_sizes=[len(parcel) for parcel in parcels],
            opened_at=[group.opened_at for group in groups],
            attempts=[group.attempts for group in groups],
            from_history=[group.trained for group in groups],
            sources=[group.source for group in groups],
        )

    def _end(self, lease_uid: str, how: Settlement) -> Lease | None:
        lease = self.leases.pop(lease_uid, None)
        if lease is not None:
            self._expiry.discard((lease.expires_at, lease.uid))
            self._books.journal.end_lease(lease, how)
            self.ended[lease_uid] = how
            if len(self.ended) > ENDED_KEPT:
                self.ended.popitem(last=False)
        return lease

    def _give_back(self, lease: Lease, *, attempted: bool = True) -> None:
        channel = self._books.channels[lease.channel]
        for group in lease.groups:
            group.lease = None
            group.attempts += attempted
            channel.take_back(group)
            channel.enter(group)
            self._books.journal.save_group(group)
            self.carry_out(group)
        for trajectory, step in lease.steps:
            step.lease = None
            if self._has(trajectory):
                self._books.chronicle.touch(trajectory)
                self._books.journal.save_step(step)
                channel.show_step(trajectory, step)
        if self._books.limits.overflow is Overflow.DROP_OLDEST:
            self._books.make_room(channel)

    def carry_out(self, group: Group) -> None:
        """What was rejected while a trainer had it goes, now that it is back."""
        for trajectory in [found for found in group.trajectories.values() if found.rejected is not None]:
            self._books.reject(trajectory, trajectory.rejected or "")

    def _to_history(self, channel: ChannelIndex, group: Group, step_filter: StepFilter, version: int) -> None:
        books, seen = self._books, self._books.timeline.seen(channel.name)
        rejected = []
        for trajectory in group.trajectories.values():
            sketch = books.close(trajectory, TrajectoryState.TRAINED, note=trajectory.rejected or "")
            left_out = self._settle(channel, trajectory, sketch, step_filter)
            if left_out:
                books.chronicle.end(trajectory, TrajectoryState.TRAINED, left_out)
            else:
                seen.add(sketch, version)
            if trajectory.rejected is not None:
                rejected.append(trajectory)
        group.lease, group.trained = None, True
        for trajectory in rejected:
            books.forget(trajectory)
        if group.trajectories:
            books.remember(channel, group)
        else:
            books.journal.remove_group(group)

    def _settle(
        self, channel: ChannelIndex, trajectory: Trajectory, sketch: TrajectorySnapshot, step_filter: StepFilter
    ) -> str:
        """Count what was trained. If all of it was left out, gives the kind. What passes as a whole counts as one."""
        worst = sketch.exactness
        if worst and sketch.untrainable == 0 and worst.at_least(step_filter.min_exactness):
            channel.ledger.shipped.add(sketch.steps - sketch.quarantined, sketch.tokens)
            return ""
        return channel.ledger.ship(trajectory.held_steps(), step_filter)

    def _settle_step(
        self, channel: ChannelIndex, trajectory: Trajectory, step: StoredStep, step_filter: StepFilter
    ) -> None:
        step.lease = None
        if self._has(trajectory):
            channel.ledger.ship((step,), step_filter)
            self._lay_down(channel, trajectory, step)

    def _has(self, trajectory: Trajectory) -> bool:
        """It may have been dropped, and counted so, while steps of it were under lease."""
        return self._books.trajectories.get(trajectory.uid) is trajectory

    def _lay_down(self, channel: ChannelIndex, trajectory: Trajectory, step: StoredStep) -> None:
        """Nothing of a step is needed any more but its identity; with the last one its group goes too."""
        step.shipped = True
        channel.hide_step(step)
        self._books.chronicle.touch(trajectory)
        self._books.journal.save_step(step)
        self._books.close_if_spent(trajectory.group)


def _has_any(steps: Iterable[StoredStep], step_filter: StepFilter) -> bool:
    """Is there anything for this consumer?"""
    return any(map(step_filter.accepts, steps))


def _wanted_trajectories(group: Group, step_filter: StepFilter) -> int:
    """How many of its trajectories have something for this consumer."""
    return sum([_has_any(trajectory.held_steps(), step_filter) for trajectory in group.trajectories.values()])
