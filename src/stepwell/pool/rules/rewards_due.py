"""What reward workers do: take complete trajectories without a reward, and report their judgements.

- A trajectory is with one worker at a time.
- A judgement counts once, and only while its trajectory is still unscored and unchanged.
- A trajectory that is not judged in time is offered again, before all younger ones.
- A failure never becomes a number.
"""

import math
from collections.abc import Iterable, Sequence

from stepwell.pool.api.plan import OnRewardFailure
from stepwell.pool.api.scoring import Judgement, JudgementOutcome, Score
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import ship, trajectory_rows
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns

REST, LONGEST_REST = 1.0, 60.0
"""Seconds from the first failure to the next attempt, doubled with each failure: a judge may be down for a while."""
REWARD_FAILED = "reward_failed"
"""The cause of what is dropped because it could not be scored."""
WHY_KEPT = 300
"""Characters of the last failure's reason that are kept."""


class RewardsDue:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def take(self, count: int, lease_uid: str, expires_at: float) -> Columns | None:
        """All held steps of up to `count` trajectories, oldest first, of all channels; None if there are none.

        The same call again gives the same data: an answer may be lost on its way.
        """
        if not self._state.has_reward_lease(lease_uid):
            chosen = self._state.oldest_unscored(count)
            if not chosen:
                return None
            self._state.lease_for_scoring(lease_uid, expires_at, chosen)
        leased = self._state.under_reward_lease(lease_uid)
        rows = [row for trajectory in leased for row in trajectory_rows(trajectory, StoredStep.is_held)]
        return ship(rows) if rows else None

    def end_silent(self, lease_uids: Iterable[str]) -> None:
        """The workers that have these leases are dead."""
        for uid in lease_uids:
            if self._state.has_reward_lease(uid):
                self._state.end_scoring(uid)

    def settle(self, judgements: Sequence[Judgement]) -> list[bool]:
        """For each, whether it counted. It does not if its trajectory was scored, changed, dropped or offered again."""
        return [self._settle(judgement) for judgement in judgements]

    def _settle(self, judgement: Judgement) -> bool:
        trajectory = self._state.being_scored(judgement.lease_uid, judgement.trajectory_uid)
        if trajectory is None:
            self._state.count_late_judgement()
            return False
        steps = [row.step for row in trajectory_rows(trajectory, StoredStep.is_held)]
        score, outcome = judgement.attempt.score, judgement.attempt.outcome
        if outcome is JudgementOutcome.SCORE and (score is None or not _fits(score, len(steps))):
            outcome = JudgementOutcome.ERROR
        self._state.settle_scoring(trajectory, outcome)
        if outcome is JudgementOutcome.SCORE and score is not None:
            self._reward(trajectory, steps, score, judgement.source)
        else:
            self._fail(trajectory, judgement.attempt.why[:WHY_KEPT])
        return True

    def _reward(self, trajectory: Trajectory, steps: Sequence[StoredStep], score: Score, source: str) -> None:
        self._state.set_reward(trajectory, score.rest, source, parts=score.parts, notes=score.notes)
        for step, value in zip(steps, score.step_rewards, strict=False):
            if value is not None:
                self._state.set_step_reward(trajectory, step, value, source)

    def _fail(self, trajectory: Trajectory, why: str) -> None:
        limits = self._state.limits
        if trajectory.failures < limits.reward_attempts:
            rest = min(LONGEST_REST, REST * 2.0 ** min(trajectory.failures - 1, 10))
            self._state.rest_scoring(trajectory, self._state.pool_time + rest)
        elif limits.on_reward_failure is OnRewardFailure.KEEP:
            self._state.give_up_scoring(trajectory)
        elif limits.on_reward_failure is OnRewardFailure.DROP:
            self._state.drop_trajectory(trajectory, REWARD_FAILED, why)
        else:
            self._state.drop_group(trajectory.group, REWARD_FAILED, why)


def _fits(score: Score, steps: int) -> bool:
    """Is it a score for that many steps, with finite numbers only?"""
    numbers = [score.value, *(reward for reward in score.step_rewards if reward is not None)]
    return len(score.step_rewards) in (0, steps) and all(map(math.isfinite, numbers))
