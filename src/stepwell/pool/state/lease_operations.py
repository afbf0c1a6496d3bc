"""Operations on leases: what a consumer has comes back to the queue, or is trained."""

from stepwell.pool.api.leasing import Settlement
from stepwell.pool.state.group_operations import GroupOperations, RewardOperations
from stepwell.pool.state.records import OUTCOME, Group, Lease, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.trainable import StepFilter

REJECTED = "rejected"
"""The cause of what a person rejected."""


class LeaseOperations(GroupOperations, RewardOperations):
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
        """As the coordinator of a batch, for all its parts. That it is acknowledged is kept until `settle`."""
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
        back = [kept for kept in trajectory.kept_rewards if of is None or kept[0] == of.identity]
        if not back:
            return
        trajectory.kept_rewards = tuple(kept for kept in trajectory.kept_rewards if kept not in back)
        self._journal.save_trajectory(trajectory)
        for identity, value, source, notes in back:
            if identity == OUTCOME:
                self.set_reward(trajectory, value, source, notes=notes)
            else:
                self.set_step_reward(trajectory, trajectory.steps[identity], value, source, notes=notes)
