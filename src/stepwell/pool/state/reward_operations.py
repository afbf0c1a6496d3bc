"""Operations on rewards, and on trajectories that reward workers judge."""

from collections.abc import Mapping

from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.state_base import StateBase
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import Json


class RewardOperations(StateBase):
    def set_reward(
        self,
        trajectory: Trajectory,
        value: float,
        source: str,
        *,
        parts: Mapping[str, float] | None = None,
        notes: str = "",
    ) -> None:
        trajectory.set_reward(value, source)
        _explain_reward(trajectory, parts, notes)
        self._changed(trajectory)
        self._rewarded(trajectory.group)

    def set_step_reward(
        self, trajectory: Trajectory, step: StoredStep, value: float, source: str, *, notes: str = ""
    ) -> None:
        step.reward, step.reward_source = value, source
        step.reward_revision += 1
        self._journal.save_step(step)
        trajectory.reward_lease = None  # a reward worker that has it did not see all of it
        if notes:
            _explain_reward(trajectory, None, notes)
            self._journal.save_trajectory(trajectory)
        self.change_log.record(trajectory)
        self._update_rewards(trajectory)
        self._rewarded(trajectory.group)

    def relabel(self, trajectory: Trajectory, value: float, source: str, notes: str = "") -> None:
        """A person's reward replaces the trajectory's and its steps'. The trajectory may be under lease or trained."""
        trajectory.reward_revision = trajectory.revision
        for step in trajectory.scored_steps():
            step.reward, step.reward_source = None, ""
            self._journal.save_step(step)
        trajectory.set_reward(value, source)
        _explain_reward(trajectory, None, notes)
        self._changed(trajectory)
        if trajectory.is_at_home:
            self._rewarded(trajectory.group)

    def count_late_reward(self, trajectory_uid: str) -> int:
        """The number of a reward for a trajectory that is handed out or gone."""
        known = self.trajectories.get(trajectory_uid)
        if known is not None:
            known.late_rewards += 1
            return known.revision
        self.closed[trajectory_uid] += 1
        self._journal.add_closed(trajectory_uid, self.closed[trajectory_uid])
        return self.closed[trajectory_uid]

    def lease_for_scoring(self, lease_uid: str, expires_at: float, trajectories: list[Trajectory]) -> None:
        self._rewards.lease_out(lease_uid, expires_at, trajectories)

    def end_scoring(self, lease_uid: str) -> None:
        """Its worker is dead: what it has not judged is offered again."""
        self._rewards.end_lease(lease_uid)

    def settle_scoring(self, trajectory: Trajectory, outcome: JudgementOutcome) -> None:
        """A worker has judged it. It is offered to the next one unless it gets a reward, rests or is given up."""
        self._rewards.settle(trajectory)
        if outcome is JudgementOutcome.SCORE:
            self._counters.scored += 1
        else:
            self._counters.failed_judgements[outcome] += 1
            trajectory.failures += 1

    def rest_scoring(self, trajectory: Trajectory, until: float) -> None:
        self._rewards.rest(trajectory, until)

    def give_up_scoring(self, trajectory: Trajectory) -> None:
        """It stays without a reward and is not offered again."""
        self._rewards.give_up(trajectory)

    def count_late_judgement(self) -> None:
        self._counters.late_judgements += 1


def _explain_reward(trajectory: Trajectory, parts: Mapping[str, float] | None, notes: str) -> None:
    """Trainers find the explanation of a reward in the metadata."""
    explanation: dict[str, Json] = {}
    if parts:
        explanation["parts"] = dict(parts)
    if notes:
        explanation["notes"] = notes
    if explanation:
        trajectory.metadata = {**trajectory.metadata, "reward": explanation}
