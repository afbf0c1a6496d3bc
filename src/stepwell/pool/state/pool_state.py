"""The pool's state and the only object that changes it.

- Each public method that changes something is one operation. When it returns, journal, change log, indexes, ledgers and
  reward queue agree with the records.
- A trajectory is in one group. A group is in one channel or under one lease.
- Data that leaves is counted under a cause, and its trajectories are remembered as closed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from stepwell.pool.api.leasing import Settlement, Unit, decision_of
from stepwell.pool.api.plan import Layout
from stepwell.pool.api.policy import Canary, PolicyDecision, Serving
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.group_operations import GroupOperations
from stepwell.pool.state.ledger import Counters, Ledger, count_steps, load_serving
from stepwell.pool.state.queues import producer_of
from stepwell.pool.state.records import A_GROUP, OUTCOME, Group, Lease, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.pool.state.tombstones import Tombstone
from stepwell.steps.step import Step
from stepwell.steps.trainable import StepFilter

REJECTED = "rejected"
"""The cause of what a person rejected."""


class PoolState(GroupOperations):
    """All operations. StateBase has what the state holds, how rules read it, and the helpers that operations end in."""

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

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease_out(self, lease: Lease) -> None:
        """Hand out the groups and steps of a new lease."""
        index = self._channels[lease.channel]
        for group in lease.groups:
            self._leave(group)
            index.begin_lease(group)
            group.lease = lease.uid
            self._counters.uniform_groups += group.attempts == 0 and group.is_uniform()
            self.change_log.record_all(group.trajectories.values())
            self._journal.save_group(group)
        for trajectory, step in lease.steps:
            index.hide_step(step)
            step.lease = lease.uid
            self.change_log.record(trajectory)
            self._journal.save_step(step)
        lease.version = self.serving.version_of(lease.channel)
        index.last_taken = sum(len(group.trajectories) for group in lease.groups) or len(lease.steps)
        self._journal.save_lease(lease)
        self._add_lease(lease)

    def count_deferred(self, count: int) -> None:
        """A batch left so many older items in the queue, because of their users."""
        self._counters.deferred += count

    def extend_lease(self, lease: Lease, expires_at: float) -> None:
        self._expiry.discard((lease.expires_at, lease.uid))
        lease.expires_at = expires_at
        self._expiry.add((expires_at, lease.uid))
        self._journal.save_lease(lease)

    def prepare_lease(self, lease: Lease) -> None:
        lease.is_prepared = True

    def decide(self, decision_uid: str, how: Settlement) -> None:
        """Records the decision of this shard, as the coordinator of a batch, for all its parts. An acknowledgement is
        kept until `settle`."""
        if how is Settlement.DONE:
            self.acknowledged.add(decision_uid)
            self._journal.save_acknowledged(decision_uid)
        else:
            self._journal.add_ended(decision_uid, how)
            self._remember_ended(decision_uid, how)

    def settle(self, decision_uid: str) -> None:
        """No shard has a part of that acknowledged batch any more."""
        self.acknowledged.remove(decision_uid)
        self._journal.remove_acknowledged(decision_uid)
        self._journal.add_ended(decision_uid, Settlement.DONE)
        self._remember_ended(decision_uid, Settlement.DONE)

    def return_leased(self, lease: Lease, how: Settlement, *, attempted: bool = True) -> None:
        """Not trained: it goes back to the queue. What a person rejected meanwhile is dropped, and feedback counts."""
        self._end_lease(lease, how)
        index = self._channels[lease.channel]
        for group in lease.groups:
            group.lease = None
            group.attempts += attempted
            index.end_lease(group)
            self._enter(group)
            self._journal.save_group(group)
            self._apply_pending_rejections(group)
            for trajectory in list(group.trajectories.values()):
                self._count_kept_rewards(trajectory)
        for trajectory, step in lease.steps:
            step.lease = None
            if self.holds(trajectory):
                self.change_log.record(trajectory)
                self._journal.save_step(step)
                index.show_step(trajectory, step)
                self._mark_incomplete(trajectory)
                self._count_kept_rewards(trajectory, of=step)

    def mark_trained(self, lease: Lease) -> None:
        """Acknowledged: groups become history, steps are shipped."""
        self._journal.add_lineage(lease, self.now)
        self._end_lease(lease, Settlement.DONE)
        index = self._channels[lease.channel]
        for group in lease.groups:
            index.end_lease(group)
            for trajectory in group.trajectories.values():
                trajectory.kept_rewards = ()  # they are late now
            self._train(group, lease.step_filter, lease.version)
        for trajectory, step in lease.steps:
            step.lease = None
            if self.holds(trajectory):
                self.ship_step(trajectory, step, lease.step_filter)

    def leave_out(self, group: Group, step_filter: StepFilter) -> None:
        """A consumer wants nothing of the group: it goes as if it were acknowledged."""
        self._leave(group)
        self._train(group, step_filter, self.serving.version_of(group.channel))

    def _apply_pending_rejections(self, group: Group) -> None:
        for trajectory in [found for found in group.trajectories.values() if found.rejected is not None]:
            self.drop_trajectory(trajectory, REJECTED, trajectory.rejected or "", frees_place=False)

    def _count_kept_rewards(self, trajectory: Trajectory, *, of: StoredStep | None = None) -> None:
        """The trajectory, or this step of it, is back."""
        back = [kept for kept in trajectory.kept_rewards if of is None or kept.identity == of.identity]
        if not back:
            return
        trajectory.kept_rewards = tuple(kept for kept in trajectory.kept_rewards if kept not in back)
        self._journal.save_trajectory(trajectory)
        for kept in back:
            if kept.identity == OUTCOME:
                self.set_reward(trajectory, kept.value, kept.source, notes=kept.notes)
            else:
                step = trajectory.steps[kept.identity]
                self.set_step_reward(trajectory, step, kept.value, kept.source, notes=kept.notes)

    # -- removal for good, whoever has the data: doing it again is harmless --------------------------------------------

    def refuse_subject(self, digest: str, at: float) -> Tombstone:
        """Take nothing more of the subject with this digest. Its data is not removed yet."""
        if digest not in self.tombstones.subjects:
            self.save_tombstone(Tombstone(digest, at))
        return self.tombstones.subjects[digest]

    def save_tombstone(self, tombstone: Tombstone) -> None:
        """What was removed has changed, or it is new."""
        self.tombstones.subjects[tombstone.subject] = tombstone
        self._journal.save_tombstone(tombstone)

    def load_tombstones(self, tombstones: Iterable[Tombstone], names: Iterable[str]) -> None:
        """Take over what a journal has."""
        self.tombstones.subjects.update({tombstone.subject: tombstone for tombstone in tombstones})
        self.tombstones.names.update(names)

    def remove_trajectory(self, trajectory: Trajectory, cause: str) -> None:
        """Take a held trajectory out of its queue, or from under its lease."""
        for lease in self.leases.values():
            if any(owner is trajectory for owner, _ in lease.steps):
                lease.steps[:] = [(owner, step) for owner, step in lease.steps if owner is not trajectory]
        if trajectory.group.lease is None:
            self.drop_trajectory(trajectory, cause, frees_place=False)
        else:
            self._take_from_lease(trajectory, cause)

    def remove_sessions(self, is_wanted: Callable[[str, str], bool]) -> list[str]:
        """Remove the sessions for whose user and last trajectory this is true. Returns their ids."""
        return self.sessions.remove(is_wanted)

    def remove_closed(self, subject: str, trajectory_uids: Collection[str]) -> None:
        """Remove what is left of trajectories that are gone: those of a subject, by its digest, and these."""
        for uid in trajectory_uids:
            self.closed.pop(uid, None)
            self.closed_subjects.pop(uid, None)
            self.change_log.remove(uid)
        self._journal.remove_closed(subject, [*trajectory_uids])
        self.version_rewards.drop_names(trajectory_uids)

    def remove_quarantined(self, is_wanted: Callable[[Step], bool]) -> int:
        """Remove the quarantined steps for which this is true. Returns how many they were."""
        sound = [step for step in self.quarantine if not is_wanted(step)]
        count = len(self.quarantine) - len(sound)
        if count:
            self.quarantine.clear()
            self.quarantine.extend(sound)
        return count

    def _take_from_lease(self, trajectory: Trajectory, cause: str) -> None:
        """A trainer has it, and keeps it; but it is not given to another one."""
        group = trajectory.group
        index = self._channels[group.channel]
        index.ledger.drop(cause, trajectory.held_steps())
        index.end_lease(group)
        del group.trajectories[trajectory.uid], self.trajectories[trajectory.uid]
        group.nbytes -= trajectory.nbytes
        group.give_up(1)
        self.sessions.end(trajectory.uid)
        self._journal.remove_trajectory(trajectory)
        if group.trajectories:
            index.begin_lease(group)
            self._journal.save_group(group)
            return
        self._journal.remove_group(group)
        for lease in self.leases.values():
            if group in lease.groups:
                lease.groups.remove(group)

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
            self.open_channel(name).claim(unit and Unit(unit))
        for name, ledger in snapshot["ledgers"].items():
            self.open_channel(name).ledger = Ledger.load(ledger)

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
        index = self.open_channel(group.channel)
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
