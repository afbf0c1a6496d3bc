"""Operations on rewards, and on trajectories that reward workers judge."""

from collections.abc import Mapping

from stepwell.pool.api.scoring import JudgementOutcome
from stepwell.pool.state.records import EXPLANATION, OUTCOME, STEP_DETAILS, Trajectory
from stepwell.pool.state.state_base import StateBase
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import Json

ABSTAINED = "abstained"
"""How a judgement ends that gives a trajectory no reward at all, because there is no evidence."""


class RewardOperations(StateBase):
    def set_reward(
        self,
        trajectory: Trajectory,
        value: float,
        source: str,
        *,
        parts: Mapping[str, float] | None = None,
        notes: str = "",
        is_rest: bool = False,
    ) -> None:
        """`is_rest`: it is what the rewards of the single steps leave over, and says nothing of a version by itself."""
        if trajectory.reward is None and not is_rest:
            self._note_first_reward(trajectory, value)
        trajectory.set_reward(value, source)
        _explain_reward(trajectory, parts, notes)
        self._changed(trajectory)
        self._rewarded(trajectory.group)

    def set_step_reward(
        self,
        trajectory: Trajectory,
        step: StoredStep,
        value: float,
        source: str,
        *,
        notes: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        """The evidence of an earlier reward is removed."""
        if step.reward is None and step.reward_revision == 0:
            self._note_first_reward(trajectory, value, step)
        step.reward, step.reward_source = value, source
        step.reward_revision += 1
        self._journal.save_step(step)
        self._rewards.note_growth(trajectory)
        if notes:
            _explain_reward(trajectory, None, notes)
        is_explained = trajectory.explain_step(step, details)
        if notes or is_explained:
            self._journal.save_trajectory(trajectory)
        self.change_log.record(trajectory)
        self._update_rewards(trajectory)
        self._rewarded(trajectory.group)

    def abstain_from_step(self, trajectory: Trajectory, step: StoredStep, details: Mapping[str, str]) -> None:
        """A reward worker gives it no reward, and says why."""
        self._counters.abstained_steps += 1
        trajectory.explain_step(step, details)
        self._journal.save_trajectory(trajectory)
        self.change_log.record(trajectory)

    def keep_reward(
        self, trajectory: Trajectory, step: StoredStep | None, value: float, source: str, notes: str
    ) -> None:
        """A trainer has the trajectory, or this step of it: the reward counts if that comes back."""
        of = OUTCOME if step is None else step.identity
        others = (kept for kept in trajectory.kept_rewards if kept[0] != of)
        trajectory.kept_rewards = (*others, (of, value, source, notes))
        self._journal.save_trajectory(trajectory)

    def relabel(self, trajectory: Trajectory, value: float, source: str, notes: str = "") -> None:
        """A person's reward replaces the trajectory's and its steps'. The trajectory may be under lease or trained."""
        if not trajectory.is_scored():
            self._note_first_reward(trajectory, value)
        trajectory.reward_revision, trajectory.kept_rewards = trajectory.revision, ()
        for step in trajectory.scored_steps():
            step.reward, step.reward_source = None, ""
            step.reward_revision = max(1, step.reward_revision)  # it had a reward: the next one is not its first
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
            self._journal.save_trajectory(known)
            return known.revision
        self.closed[trajectory_uid] += 1
        subject = self.closed_subjects.get(trajectory_uid, "")
        self._journal.add_closed(trajectory_uid, self.closed[trajectory_uid], subject)
        return self.closed[trajectory_uid]

    def lease_for_scoring(self, lease_uid: str, expires_at: float, trajectories: list[Trajectory]) -> None:
        self._rewards.lease_out(lease_uid, expires_at, trajectories)

    def end_scoring(self, lease_uid: str) -> None:
        """Its worker is dead: what it has not judged is offered again."""
        self._rewards.end_lease(lease_uid)

    def judge_by_step(self, by_step: bool) -> None:
        """Whether reward workers judge single steps, of open trajectories too, or whole trajectories."""
        if self._rewards.by_step == by_step or not self.limits.require_reward:
            return
        self._rewards.by_step = by_step
        for trajectory in self.trajectories.values():
            self._rewards.update(trajectory)
        for channel in self._channels.values():
            for group in channel.groups.values():
                self._regrouped(group)
                self.change_log.record_all(group.trajectories.values())

    def settle_scoring(self, trajectory: Trajectory) -> None:
        """A worker has judged it. It is offered to the next one if it has no reward, or has grown since."""
        self._rewards.settle(trajectory)
        self.change_log.record(trajectory)
        self._rewarded(trajectory.group)

    def fail_scoring(self, trajectory: Trajectory, outcome: JudgementOutcome) -> None:
        """A worker could not judge it. It is offered to the next one unless it rests or is given up."""
        self._rewards.settle(trajectory, failed=True)
        self._counters.failed_judgements[outcome] += 1
        trajectory.failures += 1

    def count_scored(self) -> None:
        self._counters.scored += 1

    def count_abstention(self) -> None:
        self._counters.failed_judgements[ABSTAINED] += 1

    def rest_scoring(self, trajectory: Trajectory, until: float) -> None:
        self._rewards.rest(trajectory, until)

    def give_up_scoring(self, trajectory: Trajectory) -> None:
        """It stays without a reward and is not offered again."""
        self._rewards.give_up(trajectory)
        self.change_log.record(trajectory)
        self._rewarded(trajectory.group)

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
        if steps := trajectory.step_details:
            explanation[STEP_DETAILS] = {name: dict(details) for name, details in steps.items()}
        trajectory.metadata = {**trajectory.metadata, EXPLANATION: explanation}
