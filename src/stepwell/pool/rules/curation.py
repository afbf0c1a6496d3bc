"""What people decide about single trajectories: marks, rewards, and what must not be trained.

- A rejected trajectory is in no later batch. A reward that a person gave is in every later batch. Data that a trainer
  already has cannot be taken back.
- Every decision is in the audit trail: who, when, the value before, the outcome.
- The same decision again changes nothing.
"""

import math
from collections.abc import Callable, Iterator

from stepwell.errors import BadRequest
from stepwell.pool.api.curation import BY_A_PERSON, MARKS, AuditEntry, Curation, CurationAction, CurationOutcome
from stepwell.pool.state.lease_operations import REJECTED
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.snapshots import marks_of

MOST_MARKS = 20
BY_LENGTH, WHY_LENGTH, MARK_LENGTH = 80, 500, 40

Decision = tuple[CurationOutcome, str, str]
"""The outcome, and the values before and after in words."""


class Curator:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def curate(self, curation: Curation) -> CurationOutcome:
        _check(curation)
        if self._state.tombstones.has_name(curation.trajectory_uid, curation.prompt_uid):
            return CurationOutcome.UNKNOWN
        outcome, before, after = self._decide(curation)
        entry = AuditEntry(
            at=self._state.now,
            by=curation.by,
            action=curation.action,
            trajectory_uid=curation.trajectory_uid,
            prompt_uid=curation.prompt_uid,
            outcome=outcome,
            before=before,
            after=after,
            why=curation.why,
        )
        self._state.record_audit(entry)
        return outcome

    def audit(self, limit: int, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """The last decisions, newest first."""
        trail = reversed(self._state.audit_trail) if trajectory_uid is None else self._entries_of(trajectory_uid)
        return [entry for entry, _ in zip(trail, range(limit), strict=False)]

    def repeats(self, curation: Curation) -> bool:
        """Did this person give the same reward last?"""
        entries = self._entries_of(curation.trajectory_uid)
        last = next((entry for entry in entries if entry.action is CurationAction.RELABEL), None)
        return last is not None and (last.by, last.after) == (curation.by, _words(curation.reward))

    def holds_reward_of(self, trajectory_uid: str) -> bool:
        """Did a person give the reward of this held trajectory? Then no one else may."""
        known = self._state.trajectories.get(trajectory_uid)
        return known is not None and known.is_relabelled

    def _decide(self, curation: Curation) -> Decision:
        uid = curation.trajectory_uid
        trajectory = self._state.trajectories.get(uid) or self._state.history.get(uid)
        if trajectory is None:
            return self._decide_late(curation) if uid in self._state.closed else (CurationOutcome.UNKNOWN, "", "")
        if trajectory.group.prompt_uid != curation.prompt_uid:
            return CurationOutcome.UNKNOWN, "", ""
        actions: dict[CurationAction, Callable[[Trajectory, Curation], Decision]] = {
            CurationAction.MARK: self._mark,
            CurationAction.UNMARK: self._mark,
            CurationAction.REJECT: self._reject,
            CurationAction.RELABEL: self._relabel,
        }
        return actions[curation.action](trajectory, curation)

    def _decide_late(self, curation: Curation) -> Decision:
        """The trajectory is gone. If it was rejected before, a rejection finds it as it should be."""
        last = self._state.last_snapshot(curation.trajectory_uid)
        before = "" if last is None else f"{last.state}: {last.cause}" if last.cause else last.state.value
        if curation.action is CurationAction.REJECT:
            is_rejected = last is not None and last.cause == REJECTED
            was_rejected = is_rejected or any(
                entry.action is CurationAction.REJECT and entry.outcome is CurationOutcome.DONE
                for entry in self._entries_of(curation.trajectory_uid)
            )
            return (CurationOutcome.UNCHANGED if was_rejected else CurationOutcome.LATE), before, before
        after = _words(curation.reward) if curation.action is CurationAction.RELABEL else ""
        return CurationOutcome.LATE, before, after

    def _mark(self, trajectory: Trajectory, curation: Curation) -> Decision:
        before = marks_of(trajectory)
        after = tuple(mark for mark in before if mark != curation.mark)
        if curation.action is CurationAction.MARK:
            after = before if curation.mark in before else (*before, curation.mark)
        if len(after) > MOST_MARKS:
            raise BadRequest(f"trajectory {trajectory.uid} has {MOST_MARKS} marks already; take one away first")
        if after != before:
            self._state.update_metadata(trajectory, {**trajectory.metadata, MARKS: list(after)})
        outcome = CurationOutcome.UNCHANGED if after == before else CurationOutcome.DONE
        return outcome, ", ".join(before), ", ".join(after)

    def _reject(self, trajectory: Trajectory, curation: Curation) -> Decision:
        """At once, or, while a trainer has it, when it returns. If it does not return, it was trained once."""
        note = f"by {curation.by}" + (f": {curation.why}" if curation.why else "")
        if trajectory.group.trained:
            self._state.remove_from_history(trajectory, f"rejected {note}")
            return CurationOutcome.DONE, "trained, in the history", "out of the history"
        if trajectory.group.lease is None:
            before = "complete" if trajectory.completed else "open"
            self._state.drop_trajectory(trajectory, REJECTED, note, frees_place=False)
            return CurationOutcome.DONE, before, f"dropped: {REJECTED}"
        if trajectory.rejected is not None:
            return CurationOutcome.UNCHANGED, "under lease", "dropped if it comes back"
        self._state.reject_when_returned(trajectory, note)
        return CurationOutcome.DONE, "under lease", "dropped if it comes back"

    def _relabel(self, trajectory: Trajectory, curation: Curation) -> Decision:
        value, source = curation.reward, BY_A_PERSON + curation.by
        assert value is not None, "checked before"
        before = _words(trajectory.total_return(), trajectory.reward_source)
        if trajectory.reward == value and trajectory.reward_source == source:
            return CurationOutcome.UNCHANGED, before, _words(value)
        self._state.relabel(trajectory, value, source, curation.why)
        return CurationOutcome.DONE, before, _words(value)

    def _entries_of(self, trajectory_uid: str) -> Iterator[AuditEntry]:
        """Newest first."""
        return (entry for entry in reversed(self._state.audit_trail) if entry.trajectory_uid == trajectory_uid)


def _check(curation: Curation) -> None:
    if not 1 <= len(curation.by) <= BY_LENGTH:
        raise BadRequest(f"a decision names its author, in 1 to {BY_LENGTH} characters")
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
