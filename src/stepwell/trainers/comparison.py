"""The values of a batch that are compared with a baseline (the returns of its rollouts, or what counts for its steps),
and the advantages that follow from that.

- What is left out of the batch counts as if it were there.
- A step that is trained by itself, before its rollout ends, has a value of its own and is a group of one.
- An environment's own advantages take the place of those that are computed here; credit does not change them.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stepwell.pool.client.batch import Batch
from stepwell.steps.advantages import (
    ALL,
    NO_PAST,
    BaselineInputs,
    RunningStatistics,
    baseline_advantages,
    compare_steps,
)
from stepwell.steps.columns import Columns
from stepwell.steps.credit import credit_shares
from stepwell.steps.layout import IndexArray, offsets
from stepwell.steps.returns import NO_STEP, split_rewards
from stepwell.steps.step import BoolArray
from stepwell.trainers.settings import RowSettings

ZERO_ADVANTAGE = "set_advantage_to_zero"
"""The key of an environment's `overrides` by which a sequence is not trained towards anything."""


def compare(
    batch: Batch,
    settings: RowSettings,
    past: RunningStatistics = NO_PAST,
    known_groups: IndexArray | None = None,
) -> BaselineInputs:
    """The steps of the batch, and behind them those of its groups that it does not have. Groups that were trained
    before do not change the statistics."""
    columns, trajectory_of_S = batch.columns, batch.trajectory_of_S
    left_out, whole = batch.left_out, batch.whole_groups()
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


def whole_returns(batch: Batch, settings: RowSettings) -> NDArray[np.float64]:
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


def _task_keys(batch: Batch, field: str | None, group_of_T: IndexArray) -> list[str]:
    """The task of each rollout: all rollouts of a group have that of its first step."""
    if field is None:
        return [ALL] * len(group_of_T)
    _, firsts_G = np.unique(batch.group_of_T[batch.trajectory_of_S], return_index=True)
    keys_G = [str(batch.columns.metadata[first].get(field, ALL)) for first in firsts_G.tolist()]
    return [keys_G[group] for group in group_of_T.tolist()]


def response_advantages(
    batch: Batch, settings: RowSettings, compared: BaselineInputs | None = None
) -> NDArray[np.float64]:
    """The advantage of each response token, in the order of the batch's columns; NaN for an unscored rollout, and for a
    step whose own advantages cannot be used. `compared` is what `compare` gives, if the caller has it."""
    if compared is None:
        compared = compare(batch, settings)
    shares_S = credit_shares(settings.credit, batch.columns, batch.trajectory_of_S)
    advantages_S = baseline_advantages(
        compared, settings.baseline, settings.fallback_baseline, divide_by_std=settings.divide_by_std
    )[: len(batch.columns)]
    advantages = np.repeat(shares_S * advantages_S, batch.columns.response_lengths_S)
    starts = offsets(batch.columns.response_lengths_S).tolist()
    for step, own in _own_advantages(batch.columns):
        advantages[starts[step] : starts[step + 1]] = np.nan if own is None else own
    return advantages


def unusable_advantages(columns: Columns) -> BoolArray:
    """Which steps have advantages of their own that are not one number for each token."""
    unusable_S = np.zeros(len(columns), np.bool_)
    unusable_S[[step for step, own in _own_advantages(columns) if own is None]] = True
    return unusable_S


def _own_advantages(columns: Columns) -> Iterator[tuple[int, NDArray[np.float64] | None]]:
    """The steps with advantages of their own, and those of their responses; None if they cannot be used."""
    for step, extras in enumerate(columns.extras):
        if not extras:
            continue
        response = int(columns.response_lengths_S[step])
        length = response + int(columns.prompt_lengths_S[step])
        own, overrides = extras.get("advantages"), extras.get("overrides")
        if isinstance(overrides, dict) and overrides.get(ZERO_ADVANTAGE):
            yield step, np.zeros(response)
        elif own is not None and own != []:
            yield step, _read_advantages(own, response, length)


def _read_advantages(own: object, response: int, length: int) -> NDArray[np.float64] | None:
    """The advantages of the response, from one number for each token of the step or of its response; None if they
    cannot be used."""
    if not isinstance(own, list) or len(own) not in (response, length):
        return None
    try:
        values = np.array(own, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return values[len(values) - response :] if np.isfinite(values).all() else None
