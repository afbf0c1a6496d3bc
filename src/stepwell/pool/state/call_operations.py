"""Operations on calls that are under way, on the rollouts that lack one, and on marks: who read a step.

- A call is open from its announcement until its step arrives, or its gateway says that none will.
- The open calls of a gateway that died are lost, unless the same was asked again since. A step that arrives later is
  lost no more.
- Of calls with one key, the agent has read at most the answer that it was given last: a gateway that gives the answer
  of an earlier call again says so, as if that one had been asked again.
- A rollout with a lost call is incomplete: its steps are marked, so that no trainer gets them. Nor does it get an
  answer that nobody read, or that was not continued.
- Of several marks of a step the one that comes last in RANKS counts, in whatever order they arrive. So a mark may be
  sent again, and may come before its step.
- A step that its agent cut short is unseen, until something else is known.
"""

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from stepwell.pool.api.plan import OnIncomplete
from stepwell.pool.api.producing import CONTINUED, READ, CallBegun, Repeats
from stepwell.pool.state.records import AskedCall, LostCall, Mark, OpenCalls, Trajectory
from stepwell.pool.state.state_base import StateBase
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import CUT_SHORT, Exactness
from stepwell.steps.trainable import INCOMPLETE, NO_CONSENT, NOT_CONTINUED, UNSEEN, fault_kind

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


class CallOperations(StateBase):
    # -- calls ---------------------------------------------------------------------------------------------------------

    def set_gateways(self, trajectory: Trajectory, gateways: Iterable[str]) -> None:
        """Sets the gateways that may hold steps of the trajectory."""
        now = tuple(sorted(set(gateways)))
        if now != trajectory.gateways:
            trajectory.gateways = now
            self._journal.save_trajectory(trajectory)

    def begin_call(self, call: CallBegun) -> None:
        trajectory = self._at_home(call.trajectory_uid)
        if trajectory is None or trajectory.completed:
            return
        calls = trajectory.calls = trajectory.calls or OpenCalls()
        asked = calls.asked[call.key] if call.key else []
        own = AskedCall(call.began_at, call.uid, call.repeats is Repeats.ALL)
        is_told_again = own in asked
        is_given_again = not is_told_again and any(other.uid == call.uid for other in asked)
        if not is_told_again:
            place = bisect(asked, own.began_at, key=attrgetter("began_at"))
            earlier, later = asked[:place], asked[place:]
            lost, asked_later = {lost.uid for lost in trajectory.lost_calls}, {one.uid for one in (own, *later)}
            was_replaced = calls.is_replaced(call.uid)
            asked.insert(place, own)
            if call.repeats is not Repeats.NONE:
                repeated = [one.uid for one in earlier if own.replaces_all or one.uid in lost]
                self._replace_calls(trajectory, [uid for uid in repeated if uid not in asked_later])
            if calls.is_replaced(call.uid):
                self._replace_calls(trajectory, [own.uid])
            elif was_replaced:
                self.mark_steps(trajectory, [own.uid], READ)
        if not is_given_again and call.uid not in trajectory.steps:
            calls.gateways[call.uid] = call.gateway

    def end_call(self, trajectory_uid: str, uid: str, *, is_lost: bool) -> None:
        """It brings no step."""
        trajectory = self._at_home(trajectory_uid)
        if trajectory is not None:
            if trajectory.calls is not None:
                trajectory.calls.gateways.pop(uid, None)
            if is_lost and uid not in trajectory.steps:  # whatever its gateway tells later
                self._set_lost(trajectory, {*trajectory.lost_calls, LostCall("", uid)})

    def lose_gateway(self, gateway: str, *, is_dead: bool = True, heir: str = "") -> None:
        """It holds nothing any more. If it died, its open calls are lost, but for what its heir still sends."""
        for trajectory in list(self.trajectories.values()):
            if gateway in trajectory.gateways:
                self.set_gateways(trajectory, {*trajectory.gateways, heir} - {gateway, ""})
            calls = trajectory.calls
            gone = [] if calls is None else [uid for uid, holder in calls.gateways.items() if holder == gateway]
            if calls is None or not gone:
                continue
            for uid in gone:
                del calls.gateways[uid]
            if is_dead:
                repeated = [uid for uid in gone if calls.is_asked_again(uid)]
                missing = {LostCall(gateway, uid) for uid in gone if uid not in repeated}
                self._set_lost(trajectory, {*trajectory.lost_calls, *missing})
                self._replace_calls(trajectory, repeated)

    def lose_untold(self, gateway: str) -> None:
        """It died before it could tell a shard that has restarted: what it served may lack a call."""
        for trajectory in list(self.trajectories.values()):
            if gateway in trajectory.gateways and not trajectory.completed:
                self._set_lost(trajectory, {*trajectory.lost_calls, LostCall(gateway, "")})

    def tell_calls(self, gateway: str, calls: Sequence[CallBegun]) -> None:
        """All that a living gateway has under way. What was taken for lost of it is not; its other calls are over."""
        told = {call.uid for call in calls}
        for trajectory in list(self.trajectories.values()):
            self._set_lost(trajectory, {lost for lost in trajectory.lost_calls if lost.gateway != gateway})
            if trajectory.calls is not None:
                held = trajectory.calls.gateways
                for uid in [uid for uid, holder in held.items() if holder == gateway and uid not in told]:
                    del held[uid]
        for call in calls:
            self.begin_call(call)

    def _at_home(self, uid: str) -> Trajectory | None:
        trajectory = self.trajectories.get(uid)
        return trajectory if trajectory is not None and trajectory.is_at_home else None

    def _call_arrived(self, trajectory: Trajectory, uid: str) -> None:
        """With its step."""
        if trajectory.calls is not None:
            trajectory.calls.gateways.pop(uid, None)
        if trajectory.lost_calls:
            self._set_lost(trajectory, {lost for lost in trajectory.lost_calls if lost.uid != uid})

    def _replace_calls(self, trajectory: Trajectory, uids: Sequence[str]) -> None:
        """The same was asked again, so nobody read their answers: nothing is missing without them."""
        if uids:
            self.mark_steps(trajectory, uids, UNSEEN, over=READ)
            self._set_lost(trajectory, {lost for lost in trajectory.lost_calls if lost.uid not in uids})

    def _set_lost(self, trajectory: Trajectory, lost: Iterable[LostCall]) -> None:
        now = tuple(sorted(lost))
        if now != trajectory.lost_calls and trajectory.is_at_home:
            trajectory.lost_calls = now
            self._mark_incomplete(trajectory)
            self._changed(trajectory)

    # -- marks ---------------------------------------------------------------------------------------------------------

    def mark_steps(self, trajectory: Trajectory, uids: Collection[str], name: str, *, over: str = "") -> None:
        """Marks steps of a trajectory that is at home. The mark counts more than that of `over`, whatever their ranks.
        An answer that its agent has asked for again since is not read by what is told late of an earlier try."""
        for uid in uids:
            known = trajectory.marks.get(uid)
            if known is not None and known.name != over and RANKS.index(known.name) >= RANKS.index(name):
                continue
            if name == READ and trajectory.calls is not None and trajectory.calls.is_replaced(uid):
                continue
            step = trajectory.steps.get(uid)
            if step is not None and (step.shipped or step.lease is not None):
                self.count_mark(LATE)
            elif step is None and known is None and len(trajectory.marks) >= MOST_EARLY + len(trajectory.steps):
                self.count_mark(TOO_MANY)
            else:
                own = known.own_reason if known is not None else None if step is None else _own_reason(step)
                self._set_mark(trajectory, uid, Mark(name, own), step)
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
        self.count_mark(mark.name)
        if step is not None:
            step.untrainable = reason_of(mark)

    def _mark_arrived(self, trajectory: Trajectory, step: StoredStep) -> None:
        """A step arrives. Its mark may be there already."""
        known = trajectory.marks.get(step.uid)
        if known is not None:
            trajectory.marks[step.uid] = Mark(known.name, step.untrainable)
            step.untrainable = reason_of(trajectory.marks[step.uid])
        elif step.finish_reason == CUT_SHORT and step.exactness is not Exactness.SUBMITTED:
            self._set_mark(trajectory, step.uid, Mark(UNSEEN, step.untrainable), step)
        else:
            return
        self._journal.save_trajectory(trajectory)


def _own_reason(step: StoredStep) -> str | None:
    """Why it is untrainable, whatever its rollout lacks."""
    return None if step.untrainable == A_CALL_IS_MISSING else step.untrainable


def reason_of(mark: Mark) -> str | None:
    """Why a step with this mark is not trained; None if it is."""
    own = mark.own_reason
    return own if own is not None and fault_kind(own) == NO_CONSENT else REASONS.get(mark.name, own)
