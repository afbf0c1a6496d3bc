"""The pool's state and the only object that changes it.

- Each public method that changes something is one operation. When it returns, journal, change log, indexes, ledgers and
  reward queue agree with the records.
- A trajectory is in one group. A group is in one channel or under one lease.
- Data that leaves is counted under a cause, and its trajectories are remembered as closed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from stepwell.pool.api.curation import AuditEntry
from stepwell.pool.api.leasing import Settlement, Unit, decision_of
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.api.shard_layout import Layout
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.counters import Counters, load_ledger
from stepwell.pool.state.lease_operations import LeaseOperations
from stepwell.pool.state.ledger import count_steps
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.reward_operations import RewardOperations


class PoolState(LeaseOperations, RewardOperations):
    """All operations. Records, reading and the helpers that they end in are in StateBase."""

    # -- the pool ------------------------------------------------------------------------------------------------------

    def advance(self, now: float, pool_time: float) -> None:
        """Set the clocks, and offer again what reward workers did not judge in time."""
        self.now = self.change_log.now = now
        self.pool_time = pool_time
        self.series.tick(now)
        self._rewards.release(pool_time)

    def set_policy_version(self, version: int) -> None:
        self.serving = replace(self.serving, policy_version=version, revision=self.serving.revision + 1)

    def change_engines(self, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
        engines = self.serving.changed(add, remove)
        if engines != self.serving.engines:
            self.serving = replace(self.serving, engines=engines, revision=self.serving.revision + 1)

    def set_living_gateways(self, gateways: tuple[str, ...]) -> None:
        self.gateways = gateways

    def set_layouts(self, layouts: Sequence[Layout], shard: int) -> None:
        """Former ones, and last the present one; and which of the shards this is."""
        self.layouts, self.shard = tuple(layouts), shard

    def retire_history(self) -> None:
        """Trained groups are kept for no later batch. They may move to the archive."""
        for index in self._channels.values():
            while index.history:
                group = index.history.popleft()
                for uid in group.trajectories:
                    self.history.pop(uid, None)
                self._journal.retire_group(group)

    def open_channel(self, name: str) -> Channel:
        """The channel of that name, a new one if there is none."""
        return self._index(name)

    def claim_unit(self, channel: Channel, unit: Unit) -> None:
        """The channel is consumed by that unit from now on."""
        index = self._channels[channel.name]
        index.claim(unit)
        if unit is not Unit.GROUPS:
            for group in index.groups.values():
                self.change_log.record_all(group.trajectories.values())

    # -- people --------------------------------------------------------------------------------------------------------

    def reject_when_returned(self, trajectory: Trajectory, note: str) -> None:
        """A trainer has it. If it comes back, it is dropped."""
        trajectory.rejected = note
        self._changed(trajectory)

    def forget_history(self, trajectory: Trajectory, note: str) -> None:
        """A trained trajectory leaves the history."""
        self._remove_history(trajectory)
        self.change_log.end(trajectory, TrajectoryState.TRAINED, note=note)

    def record_audit(self, entry: AuditEntry) -> None:
        self.audit_trail.append(entry)
        self._journal.add_audit(entry)

    # -- recovery ------------------------------------------------------------------------------------------------------

    def recall(self, snapshot: Mapping[str, Any]) -> None:
        engines = snapshot.get("engines")
        self.serving = Serving(snapshot["policy_version"], None if engines is None else tuple(engines))
        self.gateways = tuple(snapshot.get("gateways", ()))
        self.layouts = tuple(Layout(*layout) for layout in snapshot.get("layouts", ())) or self.layouts
        self._counters = Counters(**snapshot["counters"])
        for name, unit in snapshot["units"].items():
            self._index(name).claim(unit and Unit(unit))
        for name, ledger in snapshot["ledgers"].items():
            self._index(name).ledger = load_ledger(ledger)

    def load(
        self,
        groups: Sequence[Group],
        leases: Mapping[str, Lease],
        *,
        closed: Iterable[tuple[str, int]],
        ended: Iterable[tuple[str, Settlement]],
        audit: Iterable[AuditEntry],
        damaged: bool,
    ) -> None:
        """Take over the records of a journal. The state is empty before.

        After damage no number is given twice, and held steps that were not found are counted as lost.
        """
        if damaged:
            self._counters.continue_after(groups)
        self.closed.update(closed)
        self.ended_leases.update(ended)
        self.audit_trail.extend(audit)
        for group in groups:
            self._load_group(group, leases)
        for lease in leases.values():
            lease.steps.sort(key=lambda leased: leased[1].number)
            lease.version = self.policy_version
            lease.is_prepared = decision_of(lease.uid) is not None
            self._add_lease(lease)
        if damaged:
            for index in self._channels.values():
                leased = [lease.groups for lease in self.leases.values() if lease.channel == index.name]
                found = chain(index.groups.values(), *leased)
                index.ledger.repair(count_steps(step for group in found for step in group.held_steps()))

    def _load_group(self, group: Group, leases: Mapping[str, Lease]) -> None:
        index = self._index(group.channel)
        group.nbytes = sum(trajectory.nbytes for trajectory in group.trajectories.values())
        if group.trained:
            for trajectory in group.trajectories.values():
                self.change_log.end(trajectory, TrajectoryState.TRAINED)
            self._keep_history(group)
            return
        for trajectory in group.trajectories.values():
            self.trajectories[trajectory.uid] = trajectory
            for step in trajectory.steps.values():
                if step.lease is not None and step.lease in leases:
                    leases[step.lease].steps.append((trajectory, step))
        lease = leases.get(group.lease) if group.lease is not None else None
        if lease is None:
            group.lease = None
            self._enter(group)
            if not group.trajectories:
                self._regrouped(group)
            self._apply_pending_rejections(group)
        else:
            lease.groups.append(group)
            index.begin_lease(group)
            self.change_log.record_all(group.trajectories.values())
