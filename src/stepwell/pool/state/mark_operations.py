"""Marks: what is known of who read a step. An answer that nobody read, or that was not continued, is not trained.

- Of several marks of a step the one that comes last in RANKS counts, in whatever order they arrive. So a mark may be
  sent again, and may come before its step.
- A step that its agent cut short is unseen, until something else is known.
"""

from collections.abc import Collection, Mapping

from stepwell.pool.api.plan import OnIncomplete
from stepwell.pool.api.producing import CONTINUED, READ
from stepwell.pool.state.records import Mark, Trajectory
from stepwell.pool.state.state_base import StateBase
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import CARRIED, CUT_SHORT, Exactness
from stepwell.steps.trainable import INCOMPLETE, NO_CONSENT, NOT_CONTINUED, UNSEEN, fault_kind

FINISH_REASON = [column.name for column in CARRIED].index("finish_reason")
"""Its place in StoredStep.carried."""
RANKS = (UNSEEN, READ, NOT_CONTINUED, CONTINUED)
REASONS: Mapping[str, str] = {
    UNSEEN: f"{UNSEEN}: nobody read this answer to its end",
    NOT_CONTINUED: f"{NOT_CONTINUED}: another choice of this answer was continued",
}
A_CALL_IS_MISSING = f"{INCOMPLETE}: the gateway of one of its calls died, or gave the call's step up"
LATE, TOO_MANY = "late", "too_many"
"""Why a mark does not count: its step is at a trainer or gone, or too many marks of its trajectory lack their steps."""
MOST_EARLY = 1_000
"""Marks of one trajectory whose steps have not arrived."""


class MarkOperations(StateBase):
    def mark_steps(self, trajectory: Trajectory, uids: Collection[str], name: str, *, over: str = "") -> None:
        """Marks steps of a trajectory that is at home. The mark counts more than that of `over`, whatever their ranks.
        An answer that its agent has asked for again since is not read by what is told late of an earlier try."""
        for uid in uids:
            known = trajectory.marks.get(uid)
            if known is not None and known[0] != over and RANKS.index(known[0]) >= RANKS.index(name):
                continue
            if name == READ and trajectory.calls is not None and trajectory.calls.is_replaced(uid):
                continue
            step = trajectory.steps.get(uid)
            if step is not None and (step.shipped or step.lease is not None):
                self.count_mark(LATE)
            elif step is None and known is None and len(trajectory.marks) >= MOST_EARLY + len(trajectory.steps):
                self.count_mark(TOO_MANY)
            else:
                own = known[1] if known is not None else None if step is None else _own_reason(step)
                self._set_mark(trajectory, uid, (name, own), step)
        self._mark_incomplete(trajectory)
        self._changed(trajectory)

    def count_mark(self, name: str, count: int = 1) -> None:
        self._counters.marked[name] += count

    def _mark_incomplete(self, trajectory: Trajectory) -> None:
        """Its steps, or no longer. A step that has a mark of another kind keeps it."""
        is_incomplete = bool(trajectory.lost_calls) and self.limits.on_incomplete is OnIncomplete.LEAVE_OUT
        for step in trajectory.held_steps():
            if step.lease is None and _own_reason(step) is None:
                step.untrainable = A_CALL_IS_MISSING if is_incomplete else None

    def _set_mark(self, trajectory: Trajectory, uid: str, mark: Mark, step: StoredStep | None) -> None:
        trajectory.marks[uid] = mark
        self.count_mark(mark[0])
        if step is not None:
            step.untrainable = reason_of(mark)

    def _mark_arrived(self, trajectory: Trajectory, step: StoredStep) -> None:
        """A step arrives. Its mark may be there already."""
        known = trajectory.marks.get(step.uid)
        if known is not None:
            trajectory.marks[step.uid] = known[0], step.untrainable
            step.untrainable = reason_of(trajectory.marks[step.uid])
        elif step.carried[FINISH_REASON] == CUT_SHORT and step.exactness is not Exactness.SUBMITTED:
            self._set_mark(trajectory, step.uid, (UNSEEN, step.untrainable), step)
        else:
            return
        self._journal.save_trajectory(trajectory)


def _own_reason(step: StoredStep) -> str | None:
    """Why it is untrainable, whatever its rollout lacks."""
    return None if step.untrainable == A_CALL_IS_MISSING else step.untrainable


def reason_of(mark: Mark) -> str | None:
    """Why a step with this mark is not trained; None if it is."""
    name, own = mark
    return own if own is not None and fault_kind(own) == NO_CONSENT else REASONS.get(name, own)
