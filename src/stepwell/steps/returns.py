"""The rewards of one trajectory: its outcome reward, the rewards of its steps, and the return that they form.

In a batch and in a file, one step shows the outcome reward if it has no reward of its own: the last that is not marked
untrainable, because a side call must not earn the reward of the task. `take_apart` tells the two kinds of reward apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepwell.common.message_format import message
from stepwell.steps.columns import Columns
from stepwell.steps.layout import IndexArray, reward_carrier, run_lengths
from stepwell.steps.step import OF_STEP, OF_TRAJECTORY, Step


@message
@dataclass(slots=True)
class GivenReward:
    value: float
    source: str = ""
    revision: int = 0


@dataclass(slots=True)
class TrajectoryRewards:
    """All rewards of one trajectory. May be changed before they are put together again."""

    of_steps: list[GivenReward | None]
    """The steps' own."""
    outcome: GivenReward | None
    carrier: int
    """The step that shows the outcome reward, if it has no reward of its own."""

    def total(self) -> float | None:
        given = [reward.value for reward in (*self.of_steps, self.outcome) if reward is not None]
        return math.fsum(given) if given else None

    def shown(self) -> list[GivenReward | None]:
        """The reward that each step shows."""
        shown = list(self.of_steps)
        shown[self.carrier] = shown[self.carrier] or self.outcome
        return shown


def take_apart(columns: Columns) -> TrajectoryRewards:
    """The rewards of a trajectory, all of whose steps these are. An older file does not tell the outcome reward: the
    reward of the step that would show it counts as such."""
    values = zip(columns.rewards_S.tolist(), columns.reward_sources, columns.reward_revisions_S.tolist(), strict=True)
    of_steps = [None if math.isnan(value) else GivenReward(value, source, n) for value, source, n in values]
    carrier = reward_carrier(columns.untrainable)
    total, outcome = float(columns.returns_S[0]), float(columns.outcomes_S[0])
    if OF_TRAJECTORY in columns.rewards_of:
        shown_at = columns.rewards_of.index(OF_TRAJECTORY)
        given, of_steps[shown_at] = of_steps[shown_at], None
        return TrajectoryRewards(of_steps, given, carrier)
    shown = None if OF_STEP in columns.rewards_of else of_steps[carrier]
    is_shown = math.isnan(total) or math.isclose(total, math.fsum(own.value for own in of_steps if own), abs_tol=1e-9)
    if shown is not None and is_shown and (math.isnan(total) or shown.value == outcome):
        of_steps[carrier] = None
        return TrajectoryRewards(of_steps, shown, carrier)
    newest = max((own.revision for own in of_steps if own), default=1)
    return TrajectoryRewards(of_steps, None if math.isnan(outcome) else GivenReward(outcome, "", newest), carrier)


def put_together(columns: Columns, rewards: TrajectoryRewards) -> Columns:
    """The same steps with these rewards."""
    shown, outcome = rewards.shown(), rewards.outcome
    return replace(
        columns,
        rewards_S=_numbers([None if reward is None else reward.value for reward in shown]),
        reward_sources=["" if reward is None else reward.source for reward in shown],
        rewards_of=["" if reward is None else OF_TRAJECTORY if reward is outcome else OF_STEP for reward in shown],
        reward_revisions_S=np.array([0 if reward is None else reward.revision for reward in shown], np.int32),
        returns_S=_numbers([rewards.total()] * len(shown)),
        outcomes_S=_numbers([None if outcome is None else outcome.value] * len(shown)),
    )


def split_rewards(columns: Columns, trajectory_of_S: IndexArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The outcome reward of each trajectory of a batch, and the own reward of each step; 0 if there is none.

    Not all steps of a trajectory need be there. In an older file, the reward of the step that would show the outcome
    reward counts as such.
    """
    own: list[float] = np.nan_to_num(columns.rewards_S).tolist()
    outcome_of, total_of = columns.outcomes_S.tolist(), columns.returns_S.tolist()
    outcomes: list[float] = []
    start = 0
    for size in run_lengths(trajectory_of_S.tolist()):
        told = columns.rewards_of[start : start + size]
        carrier = start + reward_carrier(columns.untrainable[start : start + size])
        shown, outcome, total = own[carrier], outcome_of[carrier], total_of[carrier]
        if any(told):
            outcomes.append(outcome)
            own[start : start + size] = [
                0.0 if of == OF_TRAJECTORY else reward
                for of, reward in zip(told, own[start : start + size], strict=True)
            ]
        else:
            is_own = math.isclose(total, math.fsum(own[start : start + size]) + outcome, abs_tol=1e-9)
            outcomes.append(shown if math.isnan(total) else outcome)
            if math.isnan(total) or (shown == outcome and not is_own):
                own[carrier] = 0.0
        start += size
    return np.nan_to_num(outcomes), np.array(own, np.float64)


def return_of(steps: Sequence[Step]) -> float | None:
    """The return of their trajectory; in an older file the sum of their rewards; None if there is no reward."""
    known = next((step.trajectory_return for step in steps if step.trajectory_return is not None), None)
    rewards = [step.reward for step in steps if step.reward is not None]
    return known if known is not None else math.fsum(rewards) if rewards else None


def _numbers(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, np.float64)
