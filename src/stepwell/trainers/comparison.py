"""The values of a batch that are compared with a baseline: the returns of its rollouts, or what counts for its steps.

- What is left out of the batch counts as if it were there.
- A step that is trained by itself, before its rollout ends, has a value of its own and is a group of one.
"""

import numpy as np
from numpy.typing import NDArray

from stepwell.steps.advantages import ALL, NO_PAST, BaselineInputs, RunningStatistics, compare_steps
from stepwell.steps.layout import IndexArray
from stepwell.steps.returns import NO_STEP, split_rewards
from stepwell.steps.step import BoolArray
from stepwell.trainers.ports import TrainingBatch
from stepwell.trainers.settings import RowSettings


def compare(
    batch: TrainingBatch,
    settings: RowSettings,
    past: RunningStatistics = NO_PAST,
    known_groups: IndexArray | None = None,
) -> BaselineInputs:
    """The steps of the batch, and behind them those of its groups that it does not have. Groups that were trained
    before do not change the statistics."""
    columns, trajectory_of_S, left_out, whole = (
        batch.columns,
        batch.trajectory_of_S,
        batch.left_out,
        batch.whole_groups(),
    )
    rewards_E, present = np.nan_to_num(left_out.rewards_E), len(batch.group_of_T)
    returns_T = whole_returns(batch, settings)
    is_step_E = left_out.step_indexes_E != NO_STEP
    kind = settings.advantage
    if settings.unit == "steps":  # what counts for a step is its return, and no other step is there
        kind, is_step_E = "rollout", np.zeros_like(is_step_E)
    outcomes_T, rewards_S = np.zeros(present), np.zeros(len(columns))
    if kind != "rollout":  # for that, only the return counts
        outcomes_T, rewards_S = split_rewards(columns, trajectory_of_S)
    return compare_steps(
        kind,
        returns_T,
        np.concatenate([outcomes_T, np.nan_to_num(whole.outcomes_T[present:])]),
        np.concatenate([rewards_S, rewards_E[is_step_E]]),
        np.concatenate([trajectory_of_S, whole.trajectory_of_E[is_step_E]]),
        whole.group_of_T,
        np.concatenate([columns.step_indexes_S, left_out.step_indexes_E[is_step_E]]),
        keys_T=_task_keys(batch, settings.baseline_key, whole.group_of_T),
        is_new_T=_outside(whole.group_of_T, known_groups),
        past=past,
    )


def whole_returns(batch: TrainingBatch, settings: RowSettings) -> NDArray[np.float64]:
    """The return of each rollout of the groups; NaN if it is unscored.

    A single step has what counts for it: its own reward, the outcome reward if there is one already, and with
    `reward_to_go` those of later steps that have one.
    """
    if settings.unit != "steps":
        return batch.whole_groups().returns_T
    outcomes_S, rewards_S = split_rewards(batch.columns, batch.trajectory_of_S)
    is_scored_S = ~np.isnan(batch.columns.rewards_S) | ~np.isnan(batch.columns.outcomes_S)
    later_S: NDArray[np.float64] = np.zeros(len(rewards_S))
    if settings.advantage == "reward_to_go":
        trajectory_of_E = batch.whole_groups().trajectory_of_E
        later_S = np.bincount(trajectory_of_E, batch.left_out.rewards_E, len(rewards_S)).astype(np.float64)
        is_scored_S |= np.bincount(trajectory_of_E, minlength=len(rewards_S)) > 0
    return np.where(is_scored_S, outcomes_S + rewards_S + later_S, np.nan)


def _outside(group_of_T: IndexArray, known_groups: IndexArray | None) -> BoolArray:
    """Which rollouts are in none of these groups."""
    if known_groups is None or not len(known_groups):
        return np.ones(len(group_of_T), np.bool_)
    return np.isin(group_of_T, known_groups, invert=True)


def _task_keys(batch: TrainingBatch, field: str | None, group_of_T: IndexArray) -> list[str]:
    """The task of each rollout: all rollouts of a group have that of its first step."""
    if field is None:
        return [ALL] * len(group_of_T)
    _, firsts_G = np.unique(batch.group_of_T[batch.trajectory_of_S], return_index=True)
    keys_G = [str(batch.columns.metadata[first].get(field, ALL)) for first in firsts_G.tolist()]
    return [keys_G[group] for group in group_of_T.tolist()]
