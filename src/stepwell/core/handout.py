"""What consumers do: take what is ready under a lease, acknowledge it, or let it come back.

What always holds: what was handed out is handed out again only if its lease expired or was given back; then it is the
oldest there is and goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from stepwell.core.books import Books
from stepwell.core.channel import Channel
from stepwell.core.group import Group, Trajectory
from stepwell.core.held import HeldStep
from stepwell.core.lease import Lease, Order, Settlement, Taken, Unit, Wanted
from stepwell.core.limits import OnStale, Overflow
from stepwell.core.priority import PrioritySet
from stepwell.core.shipping import Row, group_rows, ship, trajectory_rows
from stepwell.core.staleness import is_trained, oldest_version
from stepwell.errors import BadRequest, Conflict

ENDED_KEPT = 10_000
"""How many ended leases are remembered, to tell an expired one from one that was acknowledged before."""


class Handout:
    def __init__(self, books: Books) -> None:
        self.leases: dict[str, Lease] = {}
        self._books = books
        self._expiry: PrioritySet[tuple[float, str]] = PrioritySet()
        self.ended: OrderedDict[str, Settlement] = OrderedDict()
        """The last leases that are over, and how they ended."""

    def take(self, wanted: Wanted, lease_uid: str, expires_at: float) -> Taken | None:
        """What is wanted, under a lease of that name; None while there is not enough.

        Asking again under the same name gives the same again: an answer may be lost on its way.
        """
        if lease_uid in self.leases:
            return self._shipment(self.leases[lease_uid], [])
        channel = self._books.channels.get(wanted.channel)
        if channel is None:
            return None
        self._claim(channel, wanted)
        old = channel.draw_history(round(wanted.count * wanted.history))
        lease = Lease(lease_uid, channel.name, expires_at)
        if wanted.unit is Unit.STEPS:
            lease.steps = self._choose_steps(channel, wanted.count)
            enough = len(lease.steps) == wanted.count
        else:
            fresh = wanted.count - len(old)
            lease.groups = self._choose_groups(channel, wanted, fresh)
            enough = len(lease.groups) == fresh
        if not enough:
            return None
        self._begin(lease, channel)
        return self._shipment(lease, old)

    def ack(self, lease_uid: str) -> Settlement:
        """The data was trained: it is the pool's no more."""
        lease = self._end(lease_uid, Settlement.DONE)
        if lease is None:
            return self.ended.get(lease_uid, Settlement.UNKNOWN)
        channel = self._books.channels[lease.channel]
        for group in lease.groups:
            channel.ledger.shipped.add(group.held_steps())
            self._books.close_all(group)
            self._to_history(channel, group)
        for trajectory, step in lease.steps:
            self._ship_step(channel, trajectory, step)
        return Settlement.DONE

    def nack(self, lease_uid: str) -> Settlement:
        """The data was not trained: it goes back to the head of its queue."""
        lease = self._end(lease_uid, Settlement.DONE)
        if lease is None:
            return self.ended.get(lease_uid, Settlement.UNKNOWN)
        self._give_back(lease)
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

    def _claim(self, channel: Channel, wanted: Wanted) -> None:
        if wanted.history and wanted.unit is not Unit.GROUPS:
            raise BadRequest(f"history is kept by groups; a batch of {wanted.unit} cannot mix it in")
        if channel.unit is None:
            channel.consume_by(wanted.unit)
        elif channel.unit is not wanted.unit:
            raise Conflict(f"channel {channel.name!r} is consumed by {channel.unit}, not by {wanted.unit}")

    def _choose_groups(self, channel: Channel, wanted: Wanted, count: int) -> list[Group]:
        """Fewer than `count` if there are fewer. What has become stale is dropped when it is come upon."""
        while True:
            if wanted.unit is Unit.TRAJECTORIES:
                chosen = [self._books.trajectories[key[3]] for key in channel.ready_trajectories.smallest(count)]
                stale = [trajectory for trajectory in chosen if self._is_stale(trajectory.held_steps())]
                for trajectory in stale:
                    self._drop_stale_trajectory(trajectory)
                if not stale:
                    return [self._alone(channel, trajectory) for trajectory in chosen] if len(chosen) == count else []
            else:
                keys = (channel.by_age if wanted.order is Order.STRICT else channel.ready).smallest(count)
                groups = [channel.groups[seq] for _, seq in keys]
                stale_groups = [group for group in groups if self._is_stale(group.held_steps())]
                for group in stale_groups:
                    self._books.drop_group(group, "stale")
                if not stale_groups:
                    return [group for group in groups if group.key in channel.ready]

    def _choose_steps(self, channel: Channel, count: int) -> list[tuple[Trajectory, HeldStep]]:
        while True:
            chosen = [channel.step(number) for (number,) in channel.ready_steps.smallest(count)]
            stale = [(trajectory, step) for trajectory, step in chosen if self._is_stale((step,))]
            for trajectory, step in stale:
                channel.ledger.drop("stale", (step,))
                self._lay_down(channel, trajectory, step)
            if not stale:
                return chosen

    def _is_stale(self, steps: Iterable[HeldStep]) -> bool:
        """Would nothing of it be trained under the pool's rule for old data?"""
        limits = self._books.limits
        if limits.max_staleness is None or limits.on_stale is OnStale.KEEP:
            return False
        held = list(steps)
        oldest = oldest_version(held)
        if oldest is None:
            return False
        if self._books.policy_version - oldest <= limits.max_staleness:
            return False
        return limits.on_stale is OnStale.DROP or not any(is_trained(step, self._oldest_trained()) for step in held)

    def _oldest_trained(self) -> int | None:
        limits = self._books.limits
        if limits.max_staleness is None or limits.on_stale is not OnStale.MASK:
            return None
        return self._books.policy_version - limits.max_staleness

    def _drop_stale_trajectory(self, trajectory: Trajectory) -> None:
        self._shrink(trajectory.group)
        self._books.drop_trajectory(trajectory, "stale")

    def _alone(self, channel: Channel, trajectory: Trajectory) -> Group:
        """A complete trajectory as a group of its own, so that it can go while its group waits for the others."""
        group = trajectory.group
        if group.size == 1:
            return group
        self._shrink(group)
        self._books.take_out(trajectory)
        self._books.counters.opened += 1
        alone = Group(self._books.counters.opened, group.age, group.prompt_uid, channel.name, 1, group.opened_at)
        alone.nbytes = sum(step.nbytes for step in trajectory.steps.values())
        channel.enter(alone)
        self._books.join(alone, trajectory)
        channel.completed += 1
        return alone

    def _shrink(self, group: Group) -> None:
        group.size -= 1
        self._books.journal.save_group(group)

    # -- handing out and back ------------------------------------------------------------------------------------------

    def _begin(self, lease: Lease, channel: Channel) -> None:
        for group in lease.groups:
            channel.leave(group)
            channel.lend(group)
            group.lease = lease.uid
            self._books.journal.save_group(group)
        for _, step in lease.steps:
            channel.hide_step(step)
            step.lease = lease.uid
            self._books.journal.save_step(step)
        channel.last_taken = sum(len(group.trajectories) for group in lease.groups) or len(lease.steps)
        self._books.journal.save_lease(lease)
        self.restore(lease)

    def _shipment(self, lease: Lease, old: list[Group]) -> Taken:
        if lease.steps:
            rows = [_step_row(trajectory, step) for trajectory, step in lease.steps]
            return Taken(
                columns=ship(rows, self._oldest_trained()),
                group_sizes=[1] * len(rows),
                opened_at=[row.step.started_at for row in rows],
                attempts=[0] * len(rows),
                from_history=[False] * len(rows),
            )
        groups = [*lease.groups, *old]
        parcels = [group_rows(group) for group in groups]
        return Taken(
            columns=ship([row for parcel in parcels for row in parcel], self._oldest_trained()),
            group_sizes=[len(parcel) for parcel in parcels],
            opened_at=[group.opened_at for group in groups],
            attempts=[group.attempts for group in groups],
            from_history=[group.trained for group in groups],
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

    def _give_back(self, lease: Lease) -> None:
        channel = self._books.channels[lease.channel]
        for group in lease.groups:
            group.lease = None
            group.attempts += 1
            channel.take_back(group)
            channel.enter(group)
            self._books.journal.save_group(group)
        for trajectory, step in lease.steps:
            step.lease = None
            if trajectory.group.seq in channel.groups:
                self._books.journal.save_step(step)
                channel.show_step(trajectory, step)
            else:
                channel.ledger.drop("evicted", (step,))  # its group went while it was away
        if self._books.limits.overflow is Overflow.DROP_OLDEST:
            self._books.make_room(channel)

    def _to_history(self, channel: Channel, group: Group) -> None:
        group.lease, group.trained = None, True
        channel.take_back(group)
        leaving = channel.remember(group)
        if leaving is not group:
            self._books.journal.save_group(group)
        if leaving is not None:
            self._books.journal.retire_group(leaving)

    def _ship_step(self, channel: Channel, trajectory: Trajectory, step: HeldStep) -> None:
        channel.ledger.shipped.add((step,))
        step.lease = None
        if trajectory.group.seq in channel.groups:
            self._lay_down(channel, trajectory, step)

    def _lay_down(self, channel: Channel, trajectory: Trajectory, step: HeldStep) -> None:
        """Nothing of a step is needed any more but its identity; with the last one its group goes too."""
        step.shipped = True
        channel.hide_step(step)
        self._books.journal.save_step(step)
        self._books.close_if_spent(trajectory.group)


def _step_row(trajectory: Trajectory, wanted: HeldStep) -> Row:
    (index,) = (index for index, step in trajectory.in_order() if step is wanted)
    last = trajectory_rows(trajectory)[-1].step if trajectory.completed else None
    return Row(trajectory, wanted, index, wanted is last)
