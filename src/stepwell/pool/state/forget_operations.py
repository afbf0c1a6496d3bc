"""Operations that remove all data of a subject, or all that is too old, from the pool's state. Doing them again is
harmless."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from stepwell.pool.api.sessions import session_prompt_uid
from stepwell.pool.state.lease_operations import LeaseOperations
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.tombstones import (
    AGE,
    DIGEST_SIZE,
    ENTRIES,
    EXPIRED,
    FORGOTTEN,
    OLDER_THAN,
    RUNNING_TIME,
    Tombstone,
    names_of,
)
from stepwell.steps.digest import lineage_name

QUEUE, LEASE, HISTORY = "queue", "lease", "history"
"""Where a removed trajectory was."""
PIECE_BYTES = 2**21
"""Bytes of trajectories that are removed at once: other calls wait meanwhile."""


class ForgetOperations(LeaseOperations):
    def note_forgotten(self, subject: str, at: float) -> Tombstone:
        """From now on nothing of the subject with this digest is taken. What is held is removed by `forget_held`."""
        tombstone = self.tombstones.subjects.get(subject)
        if tombstone is None:
            tombstone = self.tombstones.subjects[subject] = Tombstone(subject, at)
            self._journal.save_tombstone(tombstone)
        return tombstone

    def note_overdue(self, seconds: float | None, at: float, *, by_clock: bool) -> Tombstone:
        """What is older than that now, or than its own retention, is to be removed: `by_clock` by the wall clock alone,
        because a person says so. Of a run that is done, nothing is kept. One that is not done is extended; but one that
        a person asked for only by another such."""
        tombstone, running_time = self.tombstones.subjects.get(AGE), {} if by_clock else {RUNNING_TIME: True}
        if tombstone is None or tombstone.is_done:
            tombstone = Tombstone(AGE, at, removed={OLDER_THAN: seconds, **running_time})
            self.tombstones.subjects[AGE] = tombstone
        elif tombstone.removed.get(RUNNING_TIME, False) is not by_clock:
            given = [one for one in (seconds, tombstone.removed[OLDER_THAN]) if one is not None]
            tombstone.at, tombstone.removed[OLDER_THAN] = at, min(given, default=None)
        elif by_clock:
            del tombstone.removed[RUNNING_TIME]
            tombstone.at, tombstone.removed[OLDER_THAN] = at, seconds
        self._journal.save_tombstone(tombstone)
        return tombstone

    def is_covered(self, tombstone: Tombstone, trajectory: Trajectory) -> bool:
        """Is it data of the subject, or too old?"""
        if tombstone.is_of_age:
            metadata, arrived = trajectory.metadata, trajectory.group.opened_at
            return self.tombstones.is_due(tombstone, trajectory.born, metadata, arrived)
        return self.tombstones.is_of(tombstone.subject, trajectory.metadata)

    def save_tombstone(self, tombstone: Tombstone) -> None:
        self._journal.save_tombstone(tombstone)

    def add_forgotten_names(self, digests: Iterable[str]) -> int:
        """Returns how many of them are new."""
        fresh = [digest for digest in dict.fromkeys(digests) if digest not in self.tombstones.names]
        self.tombstones.names.update(fresh)
        if fresh:
            self._journal.add_forgotten_names(fresh)
        return len(fresh)

    def forget_held(self, tombstone: Tombstone) -> Iterator[None]:
        """Remove what the state has of the subject: trajectories in queues, under lease and in the history, quarantined
        steps, sessions, closed names. Each `next` removes some; the state may change between two of them."""
        nbytes = 0
        for trajectory in [*self._covered(tombstone)]:
            if nbytes > PIECE_BYTES:
                self._journal.save_tombstone(tombstone)
                yield
                nbytes = 0
            nbytes += trajectory.nbytes
            if self.holds(trajectory):
                self.note_removed(tombstone, trajectory, QUEUE if trajectory.group.lease is None else LEASE)
                self._forget_trajectory(trajectory, EXPIRED if tombstone.is_of_age else FORGOTTEN)
            elif self.history.get(trajectory.uid) is trajectory:
                self.note_removed(tombstone, trajectory, HISTORY)
                self._remove_history(trajectory)
        if tombstone.is_of_age:
            is_named = self.tombstones.named_by(tombstone)
            self.sessions.forget_trajectories(lambda uid: is_named(uid, ""))
        else:
            self._forget_sessions(tombstone)
        self._forget_names(tombstone)
        self._journal.save_tombstone(tombstone)
        yield

    def _covered(self, tombstone: Tombstone) -> Iterator[Trajectory]:
        """All that the state has: held ones, and the history."""
        for trajectory in (*self.trajectories.values(), *self.history.values()):
            if self.is_covered(tombstone, trajectory):
                yield trajectory

    def kept_back(self, tombstone: Tombstone, late: float) -> Iterator[Trajectory]:
        """All that the state has and that is too old by the wall clock alone, by more than so many seconds."""
        for trajectory in (*self.trajectories.values(), *self.history.values()):
            if tombstone.due_at(trajectory.born, trajectory.metadata) + late < tombstone.at:
                yield trajectory

    def _forget_sessions(self, tombstone: Tombstone) -> None:
        sessions = self.sessions.forget(lambda user: bool(user) and self.tombstones.digest(user) == tombstone.subject)
        closed = [uid for uid, subject in self.closed_subjects.items() if subject == tombstone.subject]
        names = [*map(session_prompt_uid, sessions), *closed]
        self.add_forgotten_names(self.tombstones.new_names(names))

    def note_removed(self, tombstone: Tombstone, trajectory: Trajectory, where: str) -> None:
        """Before it is removed: for the receipt and, of a subject, so that no later step of it is taken."""
        digest = self.tombstones.digest(trajectory.uid)
        listed = tombstone.removed.setdefault("trajectories", {})
        if digest not in listed:
            tombstone.removed.setdefault("lineage", []).append(lineage_name(trajectory.uid))
        listed[digest] = {
            "where": where,
            "steps": len(trajectory.steps),
            "tokens": sum(step.tokens for step in trajectory.steps.values()),
            "content": self._content_digest(trajectory),
        }
        if not tombstone.is_of_age:
            names = names_of(trajectory.uid, trajectory.group.prompt_uid)
            self.add_forgotten_names(self.tombstones.new_names(names))

    def forget_in_slices(self, tombstone: Tombstone, is_forgotten: Callable[[str, str, float], bool]) -> None:
        """What slices have about trajectories with these names, or of that time."""
        for part in self.slices:
            if count := part.forget(is_forgotten):
                count_removed(tombstone, part.name + ENTRIES, count)
        self._journal.save_tombstone(tombstone)

    def load_tombstones(self, tombstones: Iterable[Tombstone], names: Iterable[str]) -> None:
        """From a journal."""
        self.tombstones.subjects.update({tombstone.subject: tombstone for tombstone in tombstones})
        self.tombstones.names.update(names)

    def _forget_trajectory(self, trajectory: Trajectory, cause: str) -> None:
        for lease in self.leases.values():
            if any(owner is trajectory for owner, _ in lease.steps):
                lease.steps[:] = [(owner, step) for owner, step in lease.steps if owner is not trajectory]
        if trajectory.group.lease is None:
            self.drop_trajectory(trajectory, cause, frees_place=False)
        else:
            self._take_from_lease(trajectory, cause)

    def _take_from_lease(self, trajectory: Trajectory, cause: str) -> None:
        """A trainer has it, and cannot be made to forget it; but it is not given to another one."""
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

    def _forget_names(self, tombstone: Tombstone) -> None:
        """What is left of trajectories that are gone, by their names."""
        has_name = self.tombstones.named_by(tombstone)
        uids = [
            uid for uid in {*self.closed, *self.change_log.gone} if has_name(uid, "") or self._is_gone(tombstone, uid)
        ]
        for uid in uids:
            self.closed.pop(uid, None)
            self.closed_subjects.pop(uid, None)
            self.change_log.remove(uid)
        self._journal.remove_closed(tombstone.subject, uids)
        self.version_rewards.forget(set(uids))
        sound = [
            step
            for step in self.quarantine
            if not has_name(step.trajectory_uid, step.prompt_uid)
            and not (
                tombstone.is_of_age
                and step.started_at > 0
                and self.tombstones.is_due(tombstone, step.started_at, step.metadata)
            )
        ]
        if len(sound) < len(self.quarantine):
            count_removed(tombstone, "quarantined", len(self.quarantine) - len(sound))
            self.quarantine.clear()
            self.quarantine.extend(sound)

    def _is_gone(self, tombstone: Tombstone, uid: str) -> bool:
        """Has the trajectory left the pool so long ago that it is too old?"""
        last = self.change_log.last_snapshot(uid) if tombstone.is_of_age else None
        return last is not None and uid not in self.history and self.tombstones.is_due(tombstone, last.changed_at, {})

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
