"""What reward workers do: take trajectories without a reward, and report their judgements.

- A trajectory is with one worker at a time.
- A judgement counts once, and only while its trajectory is still unscored and unchanged; by step, only for steps that
  are still without a reward.
- A trajectory that is not judged in time is offered again, before all younger ones.
- A failure never becomes a number, nor does an abstention, which is not tried again.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import dropwhile, zip_longest

from stepwell.pool.api.plan import OnRewardFailure
from stepwell.pool.api.scoring import Judgement, JudgementOutcome, Score
from stepwell.pool.state.group_operations import ABSTAINED
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import ShippedRow, ship, trajectory_rows
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns

REST, LONGEST_REST = 1.0, 60.0
"""Seconds from the first failure to the next attempt, doubled with each failure: a judge may be down for a while."""
REWARD_FAILED = "reward_failed"
"""The cause of what is dropped because it could not be scored."""
NO_EVIDENCE = "the reward function abstains: nothing tells how good it was"
WHY_KEPT = 300
"""Characters of the last failure's reason that are kept."""


class RewardsDue:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def serve(self, *, by_step: bool) -> None:
        """Offer what such workers judge, from now on."""
        self._state.judge_by_step(by_step)

    def take(self, count: int, lease_uid: str, expires_at: float, *, by_step: bool = False) -> Columns | None:
        """All held steps of up to `count` trajectories, oldest first, of all channels; None if there are none.

        By step, open trajectories too, without the first steps that need no judgement any more. The same call again
        gives the same data: an answer may be lost on its way.
        """
        self.serve(by_step=by_step)
        if not self._state.has_reward_lease(lease_uid):
            chosen = self._state.oldest_unscored(count)
            if not chosen:
                return None
            self._state.lease_for_scoring(lease_uid, expires_at, chosen)
        leased = self._state.under_reward_lease(lease_uid)
        due = _rows_from_first_unsettled if by_step else _held_rows
        rows = [row for trajectory in leased for row in due(trajectory)]
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
        steps = _judged_steps(trajectory, judgement)
        score, outcome = judgement.attempt.score, judgement.attempt.outcome
        if outcome is JudgementOutcome.SCORE and (score is None or not _fits(score, len(steps))):
            outcome = JudgementOutcome.ERROR
        if outcome is not JudgementOutcome.SCORE or score is None:
            self._state.fail_scoring(trajectory, outcome)
            self._fail(trajectory, judgement.attempt.why[:WHY_KEPT])
            return True
        self._state.settle_scoring(trajectory)
        if self._reward(trajectory, steps, score, judgement.source):
            self._state.count_scored()
        elif trajectory.completed and not trajectory.is_scored():
            self._state.count_abstention()
            self._leave_unscored(trajectory, ABSTAINED, NO_EVIDENCE)
        return True

    def _reward(self, trajectory: Trajectory, steps: Sequence[StoredStep | None], score: Score, source: str) -> bool:
        """Returns whether it gave any reward. A reward that a step has stays: it may be feedback."""
        is_given = score.outcome is not None
        is_rest = any(value is not None for value in score.step_rewards)
        if score.outcome is not None:
            self._state.set_reward(
                trajectory, score.outcome, source, parts=score.parts, notes=score.notes, is_rest=is_rest
            )
        known = trajectory.step_details
        for step, value, details in zip_longest(steps, score.step_rewards, score.step_details):
            if step is None or step.reward is not None:
                continue
            if value is not None:
                self._state.set_step_reward(trajectory, step, value, source, details=details)
                is_given = True
            elif details and step.identity not in known:
                self._state.abstain_from_step(trajectory, step, details)
        return is_given

    def _fail(self, trajectory: Trajectory, why: str) -> None:
        if trajectory.failures < self._state.limits.reward_attempts:
            rest = min(LONGEST_REST, REST * 2.0 ** min(trajectory.failures - 1, 10))
            self._state.rest_scoring(trajectory, self._state.pool_time + rest)
        else:
            self._leave_unscored(trajectory, REWARD_FAILED, why)

    def _leave_unscored(self, trajectory: Trajectory, cause: str, why: str) -> None:
        """No reward worker will score it. An open one goes on, and one with rewards keeps them."""
        action = self._state.limits.on_reward_failure
        if action is OnRewardFailure.KEEP or not trajectory.completed or trajectory.is_scored():
            self._state.give_up_scoring(trajectory)
        elif action is OnRewardFailure.DROP:
            self._state.drop_trajectory(trajectory, cause, why)
        else:
            self._state.drop_group(trajectory.group, cause, why)


def _held_rows(trajectory: Trajectory) -> list[ShippedRow]:
    return trajectory_rows(trajectory, StoredStep.is_held)


def _rows_from_first_unsettled(trajectory: Trajectory) -> list[ShippedRow]:
    unsettled = {step.identity for step in trajectory.unsettled_steps()}
    return list(dropwhile(lambda row: row.step.identity not in unsettled, _held_rows(trajectory)))


def _judged_steps(trajectory: Trajectory, judgement: Judgement) -> list[StoredStep | None]:
    """The steps that the worker saw; None for one that is gone since, or that a trainer has."""
    held = {row.step.identity: row.step for row in _held_rows(trajectory)}
    if not judgement.steps:
        return list(held.values())
    steps = map(held.get, judgement.steps)
    return [None if step is None or step.lease is not None else step for step in steps]


def _fits(score: Score, steps: int) -> bool:
    """Is it a score for that many steps, with finite numbers only?"""
    numbers = [score.value, *(reward for reward in score.step_rewards if reward is not None)]
    lengths = {len(score.step_rewards), len(score.step_details)}
    return lengths <= {0, steps} and all(map(math.isfinite, numbers))
