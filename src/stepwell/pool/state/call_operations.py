"""Operations on calls that are under way, and on the rollouts that lack one.

- A call is open from its announcement until its step arrives, or its gateway says that none will.
- The open calls of a gateway that died are lost, unless the same was asked again since. A step that arrives later is
  lost no more.
- Of calls with one key, the agent has read at most the answer that it was given last: a gateway that gives the answer
  of an earlier call again says so, as if that one had been asked again.
- A rollout with a lost call is incomplete: its steps are marked, so that no trainer gets them.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from operator import attrgetter

from stepwell.pool.api.producing import READ, CallBegun, Repeats
from stepwell.pool.state.records import AskedCall, OpenCalls, Trajectory
from stepwell.steps.trainable import UNSEEN


class CallOperations(MarkOperations):
    def set_gateways(self, trajectory: Trajectory, gateways: Iterable[str]) -> None:
        """Those that may hold steps of it."""
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
            lost, asked_later = {uid for _, uid in trajectory.lost_calls}, {one.uid for one in (own, *later)}
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
                self._set_lost(trajectory, {*trajectory.lost_calls, ("", uid)})

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
                missing = {(gateway, uid) for uid in gone if uid not in repeated}
                self._set_lost(trajectory, {*trajectory.lost_calls, *missing})
                self._replace_calls(trajectory, repeated)

    def lose_untold(self, gateway: str) -> None:
        """It died before it could tell a shard that has restarted: what it served may lack a call."""
        for trajectory in list(self.trajectories.values()):
            if gateway in trajectory.gateways and not trajectory.completed:
                self._set_lost(trajectory, {*trajectory.lost_calls, (gateway, "")})

    def tell_calls(self, gateway: str, calls: Sequence[CallBegun]) -> None:
        """All that a living gateway has under way. What was taken for lost of it is not; its other calls are over."""
        told = {call.uid for call in calls}
        for trajectory in list(self.trajectories.values()):
            self._set_lost(trajectory, {lost for lost in trajectory.lost_calls if lost[0] != gateway})
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
            self._set_lost(trajectory, {lost for lost in trajectory.lost_calls if lost[1] != uid})

    def _replace_calls(self, trajectory: Trajectory, uids: Sequence[str]) -> None:
        """The same was asked again, so nobody read their answers: nothing is missing without them."""
        if uids:
            self.mark_steps(trajectory, uids, UNSEEN, over=READ)
            self._set_lost(trajectory, {lost for lost in trajectory.lost_calls if lost[1] not in uids})

    def _set_lost(self, trajectory: Trajectory, lost: Iterable[tuple[str, str]]) -> None:
        now = tuple(sorted(lost))
        if now != trajectory.lost_calls and trajectory.is_at_home:
            trajectory.lost_calls = now
            self._mark_incomplete(trajectory)
            self._changed(trajectory)
