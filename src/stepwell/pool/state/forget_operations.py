"""Operations that remove all data of a subject from the pool's state. Doing them again is harmless."""

from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from stepwell.pool.api.sessions import session_prompt_uid
from stepwell.pool.state.lease_operations import LeaseOperations
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.tombstones import DIGEST_SIZE, FORGOTTEN, Tombstone, names_of
from stepwell.steps.digest import lineage_name

QUEUE, LEASE, HISTORY = "queue", "lease", "history"
"""Where a removed trajectory was."""


class ForgetOperations(LeaseOperations):
    def note_forgotten(self, subject: str, at: float) -> Tombstone:
        """From now on nothing of the subject with this digest is taken. What is held is removed by `forget_held`."""
        tombstone = self.tombstones.subjects.get(subject)
        if tombstone is None:
            tombstone = self.tombstones.subjects[subject] = Tombstone(subject, at)
            self._journal.save_tombstone(tombstone)
        return tombstone

    def save_tombstone(self, tombstone: Tombstone) -> None:
        self._journal.save_tombstone(tombstone)

    def add_forgotten_names(self, digests: Iterable[str]) -> int:
        """Returns how many of them are new."""
        fresh = [digest for digest in dict.fromkeys(digests) if digest not in self.tombstones.names]
        self.tombstones.names.update(fresh)
        if fresh:
            self._journal.add_forgotten_names(fresh)
        return len(fresh)

    def forget_held(self, tombstone: Tombstone) -> None:
        """Remove what the state has of the subject: trajectories in queues, under lease and in the history, quarantined
        steps, sessions, closed names."""
        is_of = self._is_of(tombstone)
        for trajectory in [found for found in self.trajectories.values() if is_of(found)]:
            where = LEASE if trajectory.group.lease is not None else QUEUE
            self.note_removed(tombstone, trajectory, where)
            self._forget_trajectory(trajectory)
        for trajectory in [found for found in self.history.values() if is_of(found)]:
            self.note_removed(tombstone, trajectory, HISTORY)
            self._remove_history(trajectory)
        sessions = self.sessions.forget(lambda user: bool(user) and self.tombstones.digest(user) == tombstone.subject)
        closed = [uid for uid, subject in self.closed_subjects.items() if subject == tombstone.subject]
        names = [*map(session_prompt_uid, sessions), *closed]
        self.add_forgotten_names(self.tombstones.new_names(names))
        self._forget_names(tombstone)
        self._journal.save_tombstone(tombstone)

    def note_removed(self, tombstone: Tombstone, trajectory: Trajectory, where: str) -> None:
        """Before it is removed: for the receipt, and so that no later step of it is taken."""
        digest = self.tombstones.digest(trajectory.uid)
        tombstone.removed.setdefault("trajectories", {})[digest] = {
            "where": where,
            "steps": len(trajectory.steps),
            "tokens": sum(step.tokens for step in trajectory.steps.values()),
            "content": self._content_digest(trajectory),
        }
        add_listed(tombstone, "lineage", [lineage_name(trajectory.uid)])
        names = names_of(trajectory.uid, trajectory.group.prompt_uid)
        self.add_forgotten_names(self.tombstones.new_names(names))

    def forget_audit(self, is_forgotten: Callable[[str, str], bool]) -> None:
        """The entries about trajectories with these names. The journal's rows are removed by the shard."""
        kept = [entry for entry in self.audit_trail if not is_forgotten(entry.trajectory_uid, entry.prompt_uid)]
        if len(kept) < len(self.audit_trail):
            self.audit_trail.clear()
            self.audit_trail.extend(kept)

    def load_tombstones(self, tombstones: Iterable[Tombstone], names: Iterable[str]) -> None:
        """From a journal."""
        self.tombstones.subjects.update({tombstone.subject: tombstone for tombstone in tombstones})
        self.tombstones.names.update(names)

    def _is_of(self, tombstone: Tombstone) -> Callable[[Trajectory], bool]:
        return lambda trajectory: self.tombstones.is_of(tombstone.subject, trajectory.metadata)

    def _forget_trajectory(self, trajectory: Trajectory) -> None:
        for lease in self.leases.values():
            if any(owner is trajectory for owner, _ in lease.steps):
                lease.steps[:] = [(owner, step) for owner, step in lease.steps if owner is not trajectory]
        if trajectory.group.lease is None:
            self.drop_trajectory(trajectory, FORGOTTEN, frees_place=False)
        else:
            self._take_from_lease(trajectory)

    def _take_from_lease(self, trajectory: Trajectory) -> None:
        """A trainer has it, and cannot be made to forget it; but it is not given to another one."""
        group = trajectory.group
        index = self._channels[group.channel]
        index.ledger.drop(FORGOTTEN, trajectory.held_steps())
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

    def _forget_names(self, tombstone: Tombstone) -> None:
        """What is left of trajectories that are gone, by their names."""
        has_name = self.tombstones.has_name
        uids = [uid for uid in {*self.closed, *self.change_log.gone} if has_name(uid)]
        for uid in uids:
            self.closed.pop(uid, None)
            self.closed_subjects.pop(uid, None)
            self.change_log.remove(uid)
        self._journal.remove_closed(tombstone.subject, uids)
        self.version_rewards.forget(set(uids))
        sound = [step for step in self.quarantine if not has_name(step.trajectory_uid, step.prompt_uid)]
        if len(sound) < len(self.quarantine):
            count_removed(tombstone, "quarantined", len(self.quarantine) - len(sound))
            self.quarantine.clear()
            self.quarantine.extend(sound)

    def _content_digest(self, trajectory: Trajectory) -> str:
        """Of the token ids of its steps, in order, under the pool's key."""
        content = blake2b(key=self.tombstones.key, digest_size=DIGEST_SIZE)
        for _, step in trajectory.in_order():
            if step.quarantine is None:
                content.update(trajectory.tokens.read(step.branch, step.tokens).tobytes())
        return content.hexdigest()


def count_removed(tombstone: Tombstone, what: str, count: int) -> None:
    tombstone.removed[what] = tombstone.removed.get(what, 0) + count


def add_listed(tombstone: Tombstone, what: str, found: Collection[Any]) -> Sequence[Any]:
    """Add to a list of the receipt what it lacks."""
    listed = tombstone.removed[what] = sorted({*tombstone.removed.get(what, ()), *found})
    return listed
