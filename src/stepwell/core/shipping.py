"""Held steps on their way to a trainer: in order, indexed, the last one marked and carrying the rollout's reward."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stepwell.core.columns import Columns, join
from stepwell.core.group import Group, Trajectory
from stepwell.core.held import HeldStep
from stepwell.core.staleness import trained_mask
from stepwell.core.step import BoolArray, FloatArray, JsonObject


class Row(NamedTuple):
    trajectory: Trajectory
    step: HeldStep
    step_index: int
    is_last: bool


def group_rows(group: Group) -> list[Row]:
    return [row for trajectory in group.trajectories.values() for row in trajectory_rows(trajectory)]


def trajectory_rows(trajectory: Trajectory) -> list[Row]:
    if len(trajectory.steps) == 1:
        (step,) = trajectory.steps.values()
        index = max(0, step.step_index)
        return [Row(trajectory, step, index, trajectory.completed)] if step.is_held() else []
    held = [(index, step) for index, step in trajectory.in_order() if step.is_held()]
    last = len(held) - 1
    return [
        Row(trajectory, step, index, trajectory.completed and place == last) for place, (index, step) in enumerate(held)
    ]


def ship(rows: Sequence[Row], oldest_trained: int | None) -> Columns:
    """The rows as columns. Tokens of policy versions before `oldest_trained` are taken out of training."""
    steps = [row.step for row in rows]
    scorers = [row.trajectory if _takes_the_rollouts_reward(row) else row.step for row in rows]
    return Columns(
        tokens=join([t.tokens.read(s.branch, s.prompt_length + s.response_length) for t, s, _, _ in rows], np.int32),
        logprobs=join([_logprobs(step) for step in steps], np.float32),
        mask=_masks(steps, oldest_trained),
        prompt_lengths_S=np.array([step.prompt_length for step in steps], np.int32),
        response_lengths_S=np.array([step.response_length for step in steps], np.int32),
        rewards_S=np.array([scorer.reward for scorer in scorers], np.float64),
        reward_revisions_S=np.array([scorer.reward_revision for scorer in scorers], np.int32),
        reward_sources=[scorer.reward_source for scorer in scorers],
        step_indexes_S=np.array([row.step_index for row in rows], np.int32),
        policy_versions_S=np.array([step.policy_version for step in steps], np.int64),
        is_last_S=np.array([row.is_last for row in rows], np.bool_),
        started_at_S=np.array([step.started_at for step in steps], np.float64),
        trajectory_uids=[row.trajectory.uid for row in rows],
        prompt_uids=[row.trajectory.group.prompt_uid for row in rows],
        uids=[step.uid for step in steps],
        metadata=[_metadata(row) for row in rows],
        version_spans=[step.version_spans for step in steps],
        exactness=[step.exactness for step in steps],
        finish_reasons=[step.finish_reason for step in steps],
        sampling=[step.sampling for step in steps],
        extras=[step.extras for step in steps],
        quarantine=[step.quarantine for step in steps],
    )


def _takes_the_rollouts_reward(row: Row) -> bool:
    return row.is_last and row.step.reward is None and row.trajectory.reward is not None


def _metadata(row: Row) -> JsonObject:
    common, own = row.trajectory.metadata, row.step.metadata
    return {**common, **own} if common and own else common or own


def _logprobs(step: HeldStep) -> FloatArray:
    if step.logprobs is None:
        return np.full(step.response_length, np.nan, np.float32)
    return step.logprobs


def _masks(steps: Sequence[HeldStep], oldest_trained: int | None) -> BoolArray:
    masks = [trained_mask(step, oldest_trained) for step in steps]
    if all(mask is None for mask in masks):
        return np.ones(sum(step.response_length for step in steps), np.bool_)
    filled = [np.ones(s.response_length, np.bool_) if m is None else m for s, m in zip(steps, masks, strict=True)]
    return join(filled, np.bool_)
