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

from stepwell.pool.api.leasing import Settlement, Unit, decision_of
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.policy import Canary, PolicyDecision, Serving
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.ledger import Counters, count_steps, load_ledger, load_serving
from stepwell.pool.state.queues import producer_of
from stepwell.pool.state.records import A_GROUP, Group, Lease, Trajectory


class PoolState(RemovalOperations):
    """All operations. Records, reading and the helpers that they end in are in StateBase."""

    # -- the pool ------------------------------------------------------------------------------------------------------

    def advance(self, now: float, pool_time: float) -> None:
        """Set the clocks, and offer again what reward workers did not judge in time."""
        self.now = self.change_log.now = now
        self.pool_time = pool_time
        self.tombstones.running.advance(now, pool_time)
        self.series.tick(now)
        self._rewards.release(pool_time)

    def set_policy_version(self, version: int, withdrawn: tuple[int, ...] | None = None) -> None:
        """`withdrawn`: versions that no session gets any more; None leaves them as they are."""
        gone = self.serving.withdrawn if withdrawn is None else withdrawn
        gone = tuple(other for other in gone if other != version)
        self._serve(replace(self.serving, policy_version=version, withdrawn=gone))

    def decide_policy(self, decision: PolicyDecision, canary: Canary | None, policy_version: int | None) -> None:
        """Keep a decision and do what it says."""
        serving = self.serving
        version = serving.policy_version if policy_version is None else policy_version
        withdrawn = serving.withdrawn_after(decision.action, decision.version)
        self._serve(replace(serving, policy_version=version, canary=canary, withdrawn=withdrawn))
        self.decisions.append(decision)
        self._counters.decided[decision.action] += 1
        self._journal.save_decisions(self.decisions)

    def set_adapter(self, channel: str, adapter: str, version: int) -> None:
        """The channel's calls are answered by this adapter from now on. A pause of the channel stays."""
        policy = replace(self.serving.channel(channel), adapter=adapter, version=version)
        self._serve(self.serving.with_channel(policy))

    def pause_channel(self, channel: str, *, paused: bool) -> None:
        self._serve(self.serving.with_channel(replace(self.serving.channel(channel), paused=paused)))

    def change_engines(self, add: tuple[str, ...], remove: tuple[str, ...]) -> None:
        self._serve(replace(self.serving, engines=self.serving.changed(add, remove)))

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

    def remove_from_history(self, trajectory: Trajectory, note: str = "") -> None:
        """A trained trajectory leaves the history."""
        self._remove_history(trajectory)
        self.change_log.end(trajectory, TrajectoryState.TRAINED, note=note)

    def show_again(self, trajectories: Iterable[Trajectory]) -> None:
        """What slices say of these held trajectories has changed: watchers see them again."""
        self.change_log.record_all(trajectories)

    # -- recovery ------------------------------------------------------------------------------------------------------

    def recall(self, snapshot: Mapping[str, Any]) -> None:
        self.serving = load_serving(snapshot)
        self.version_rewards.recall(snapshot["version_rewards"])
        self.gateways = tuple(snapshot["gateways"])
        self.has_retention = snapshot["has_retention"]
        self.tombstones.running.load(snapshot["running_time"])
        self.layouts = tuple(Layout(*layout) for layout in snapshot["layouts"])
        self._counters = Counters(**snapshot["counters"])
        for name, unit in snapshot["units"].items():
            self._index(name).claim(unit and Unit(unit))
        for name, ledger in snapshot["ledgers"].items():
            self._index(name).ledger = load_ledger(ledger)

    def restart_sessions(self, pool_time: float) -> None:
        """After a restart, no session has been idle yet."""
        self.sessions.called = dict.fromkeys(self.sessions.called, pool_time)

    def load(
        self,
        groups: Sequence[Group],
        leases: Mapping[str, Lease],
        *,
        closed: Iterable[tuple[str, int, str]],
        ended: Iterable[tuple[str, Settlement]],
        acknowledged: Iterable[str],
        decisions: Iterable[PolicyDecision] = (),
        damaged: bool,
    ) -> None:
        """Take over the records of a journal. The state is empty before.

        After damage no number is given twice, and held steps that were not found are counted as lost.
        """
        if damaged:
            self._counters.continue_after(groups)
        for uid, revision, subject in closed:
            self.closed[uid] = revision
            if subject:
                self.closed_subjects[uid] = subject
        self.ended_leases.update(ended)
        self.acknowledged.update(acknowledged)
        self.decisions.extend(decisions)
        for group in groups:
            self._load_group(group, leases)
        for lease in leases.values():
            lease.steps.sort(key=lambda leased: leased[1].number)
            lease.version = self.serving.version_of(lease.channel)
            lease.is_prepared = decision_of(lease.uid) is not None
            self._add_lease(lease)
        self.pack_at_rest()
        if damaged:
            for index in self._channels.values():
                leased = [lease.groups for lease in self.leases.values() if lease.channel == index.name]
                found = chain(index.groups.values(), *leased)
                index.ledger.repair(count_steps(step for group in found for step in group.held_steps()))

    def load_slices(self, rows: Iterable[tuple[str, str, Any]]) -> None:
        """The rows of a journal: the name of the slice, the key, the value. Those of unknown slices stay there."""
        by_slice: dict[str, dict[str, Any]] = {}
        for name, key, value in rows:
            by_slice.setdefault(name, {})[key] = value
        for part in self.slices:
            part.load(by_slice.get(part.name, {}))

    def _serve(self, serving: Serving) -> None:
        if serving.policy_version != self.serving.policy_version:
            self._journal.add_version(serving.policy_version, self.now)
        if serving != self.serving:
            self.serving = replace(serving, revision=serving.revision + 1)

    def _if_held(self, lease_uid: str | None, leases: Mapping[str, Lease]) -> str | None:
        """None, and the lease has expired, if it is lost: its holder must not acknowledge what returns now."""
        if lease_uid is None or lease_uid in leases:
            return lease_uid
        self.ended_leases[lease_uid] = Settlement.EXPIRED
        return None

    def _load_group(self, group: Group, leases: Mapping[str, Lease]) -> None:
        index = self._index(group.channel)
        for trajectory in group.trajectories.values():
            trajectory.nbytes = trajectory.held_bytes()
            self._mark_incomplete(trajectory)
        group.nbytes = A_GROUP + sum(trajectory.nbytes for trajectory in group.trajectories.values())
        metadata = next((trajectory.metadata for trajectory in group.trajectories.values()), {})
        group.producer = producer_of(metadata, group.source)
        if group.trained:
            for trajectory in group.trajectories.values():
                self.change_log.end(trajectory, TrajectoryState.TRAINED)
            self._keep_history(group)
            return
        for trajectory in group.trajectories.values():
            self.trajectories[trajectory.uid] = trajectory
            self.sessions.add(trajectory, self.pool_time)
            for step in trajectory.steps.values():
                step.lease = self._if_held(step.lease, leases)
            leased = [step for step in trajectory.steps.values() if step.lease is not None]
            for step in leased:
                leases[str(step.lease)].steps.append((trajectory, step))
            if trajectory.completed and not leased:
                self._packer.awake.append(trajectory.uid)
        group.lease = self._if_held(group.lease, leases)
        lease = None if group.lease is None else leases[group.lease]
        if lease is None:
            self._enter(group)
            if not group.trajectories:
                self._regrouped(group)
            self._apply_pending_rejections(group)
        else:
            lease.groups.append(group)
            index.begin_lease(group)
            self.change_log.record_all(group.trajectories.values())
