"""What people decide about single trajectories: marks, rewards, and what must not be trained.

What always holds: a rejected trajectory is in no later batch, and the reward a person gave is the one in every later
batch; what a trainer has already got cannot be taken back. Every attempt is on the audit trail, with who, when, what
was before and what became of it. A decision that is sent again changes nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator

from stepwell.errors import BadRequest
from stepwell.pool.api.curation import BY_A_PERSON, MARKS, AuditEntry, Curation, CurationAction, CurationOutcome
from stepwell.pool.api.watching import TrajectoryState
from stepwell.pool.state.pool_state import REJECTED, PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.snapshots import marks_of, total_reward

TRAIL_KEPT = 10_000
"""Entries at hand; a journal keeps all."""
MOST_MARKS = 20
BY_LENGTH, WHY_LENGTH, MARK_LENGTH = 80, 500, 40

Decided = tuple[CurationOutcome, str, str]
"""What became of it; what was before, and after, in words."""


class Curator:
    def __init__(self, books: PoolState) -> None:
        self.trail: deque[AuditEntry] = deque(maxlen=TRAIL_KEPT)
        """Oldest first."""
        self._books = books

    def curate(self, curation: Curation) -> CurationOutcome:
        _check(curation)
        outcome, before, after = self._decide(curation)
        entry = AuditEntry(
            at=self._books.now,
            by=curation.by,
            action=curation.action,
            trajectory_uid=curation.trajectory_uid,
            prompt_uid=curation.prompt_uid,
            outcome=outcome,
            before=before,
            after=after,
            why=curation.why,
        )
        self.trail.append(entry)
        self._books.journal.add_audit(entry)
        return outcome

    def audit(self, limit: int, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """The last decisions, newest first."""
        found = self._of(trajectory_uid) if trajectory_uid is not None else reversed(self.trail)
        return [entry for entry, _ in zip(found, range(limit), strict=False)]

    def repeats(self, curation: Curation) -> bool:
        """Is it the reward that this person gave it last?"""
        last = next(
            (entry for entry in self._of(curation.trajectory_uid) if entry.action is CurationAction.RELABEL), None
        )
        return last is not None and (last.by, last.after) == (curation.by, _words(curation.reward))

    def holds_reward_of(self, trajectory_uid: str) -> bool:
        """Has a person given the reward of one that is held? Then no one else may."""
        known = self._books.trajectories.get(trajectory_uid)
        return known is not None and known.is_relabelled

    # -- how -----------------------------------------------------------------------------------------------------------

    def _decide(self, curation: Curation) -> Decided:
        uid = curation.trajectory_uid
        trajectory = self._books.trajectories.get(uid) or self._books.history.get(uid)
        if trajectory is None:
            return self._too_late(curation) if uid in self._books.closed else (CurationOutcome.UNKNOWN, "", "")
        if trajectory.group.prompt_uid != curation.prompt_uid:
            return CurationOutcome.UNKNOWN, "", ""
        acts: dict[CurationAction, Callable[[Trajectory, Curation], Decided]] = {
            CurationAction.MARK: self._mark,
            CurationAction.UNMARK: self._mark,
            CurationAction.REJECT: self._reject,
            CurationAction.RELABEL: self._relabel,
        }
        return acts[curation.action](trajectory, curation)

    def _too_late(self, curation: Curation) -> Decided:
        """It is gone. If it went because someone rejected it, then it is as it should be."""
        sketch = self._books.chronicle.last_of(curation.trajectory_uid)
        before = "" if sketch is None else f"{sketch.state}: {sketch.cause}" if sketch.cause else sketch.state.value
        if curation.action is CurationAction.REJECT:
            rejected = sketch is not None and sketch.cause == REJECTED
            done = rejected or any(
                entry.action is CurationAction.REJECT and entry.outcome is CurationOutcome.DONE
                for entry in self._of(curation.trajectory_uid)
            )
            return (CurationOutcome.UNCHANGED if done else CurationOutcome.LATE), before, before
        after = _words(curation.reward) if curation.action is CurationAction.RELABEL else ""
        return CurationOutcome.LATE, before, after

    def _mark(self, trajectory: Trajectory, curation: Curation) -> Decided:
        before = marks_of(trajectory)
        after = tuple(mark for mark in before if mark != curation.mark)
        if curation.action is CurationAction.MARK:
            after = before if curation.mark in before else (*before, curation.mark)
        if len(after) > MOST_MARKS:
            raise BadRequest(f"trajectory {trajectory.uid} has {MOST_MARKS} marks already; take one away first")
        if after != before:
            trajectory.metadata = {**trajectory.metadata, MARKS: list(after)}
            self._save(trajectory)
        return (
            CurationOutcome.UNCHANGED if after == before else CurationOutcome.DONE,
            ", ".join(before),
            ", ".join(after),
        )

    def _reject(self, trajectory: Trajectory, curation: Curation) -> Decided:
        """At once, or, while a trainer has it, when it comes back; if it does not, it was trained, and that once."""
        note = f"by {curation.by}" + (f": {curation.why}" if curation.why else "")
        if trajectory.group.trained:
            self._books.forget(trajectory)
            self._books.chronicle.end(trajectory, TrajectoryState.TRAINED, note=f"rejected {note}")
            return CurationOutcome.DONE, "trained, in the history", "out of the history"
        if trajectory.group.lease is None:
            before = "complete" if trajectory.completed else "open"
            self._books.reject(trajectory, note)
            return CurationOutcome.DONE, before, f"dropped: {REJECTED}"
        if trajectory.rejected is not None:
            return CurationOutcome.UNCHANGED, "under lease", "dropped if it comes back"
        trajectory.rejected = note
        self._save(trajectory)
        return CurationOutcome.DONE, "under lease", "dropped if it comes back"

    def _relabel(self, trajectory: Trajectory, curation: Curation) -> Decided:
        value, source = curation.reward, BY_A_PERSON + curation.by
        assert value is not None, "checked before"
        before = _words(total_reward(trajectory), trajectory.reward_source)
        if trajectory.reward == value and trajectory.reward_source == source:
            return CurationOutcome.UNCHANGED, before, _words(value)
        self._books.relabel(trajectory, value, source)
        if curation.why:
            self._books.explain_reward(trajectory, notes=curation.why)
        self._save(trajectory)
        if trajectory.group.lease is None and not trajectory.group.trained:
            channel = self._books.channels[trajectory.group.channel]
            channel.place(trajectory.group)
            channel.queue_unscored(trajectory)
        return CurationOutcome.DONE, before, _words(value)

    def _save(self, trajectory: Trajectory) -> None:
        self._books.journal.save_trajectory(trajectory)
        chronicle = self._books.chronicle
        if trajectory.group.trained:
            known = chronicle.last_of(trajectory.uid)
            chronicle.end(trajectory, TrajectoryState.TRAINED, known.cause if known else "")
        else:
            chronicle.touch(trajectory)

    def _of(self, trajectory_uid: str) -> Iterator[AuditEntry]:
        """Newest first."""
        return (entry for entry in reversed(self.trail) if entry.trajectory_uid == trajectory_uid)


def _check(curation: Curation) -> None:
    if not 1 <= len(curation.by) <= BY_LENGTH:
        raise BadRequest(f"a decision names who takes it, in 1 to {BY_LENGTH} characters")
    if len(curation.why) > WHY_LENGTH:
        raise BadRequest(f"the reason has {len(curation.why)} characters; {WHY_LENGTH} is the most")
    if curation.action in (CurationAction.MARK, CurationAction.UNMARK) and not 1 <= len(curation.mark) <= MARK_LENGTH:
        raise BadRequest(f"a mark has 1 to {MARK_LENGTH} characters")
    if curation.action is CurationAction.RELABEL and (curation.reward is None or not math.isfinite(curation.reward)):
        raise BadRequest(f"a reward is a finite number, not {curation.reward}")


def _words(reward: float | None, source: str = "") -> str:
    if reward is None:
        return "no reward"
    return f"{reward} by {source}" if source else str(reward)
