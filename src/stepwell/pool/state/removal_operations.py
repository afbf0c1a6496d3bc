"""Operations by which data leaves the pool for good, whoever has it at the moment. Doing them again is harmless."""

from collections.abc import Callable, Collection, Iterable

from stepwell.pool.state.pool_state import LeaseOperations
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.tombstones import Tombstone
from stepwell.steps.step import Step


class RemovalOperations(LeaseOperations):
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
