"""Held steps on their way to a trainer: in order, indexed, the last one marked, one carrying the rollout's reward.

What always holds: the reward is on the last row that is not marked untrainable, for a side call must not earn what the
task did; where all are marked, on the last.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns, join
from stepwell.steps.step import BoolArray, FloatArray, JsonObject

Chosen: TypeAlias = Callable[[StoredStep], bool]
"""Is a step to be shipped?"""
TokenMask: TypeAlias = Callable[[StoredStep], BoolArray | None]
"""Which response tokens of a step are trained; None means all."""


class ShippedRow(NamedTuple):
    trajectory: Trajectory
    step: StoredStep
    step_index: int
    is_last: bool
    carries_reward: bool
    """The rollout's, if it has one and the step none of its own."""


def group_rows(group: Group, chosen: Chosen) -> list[ShippedRow]:
    return [row for trajectory in group.trajectories.values() for row in trajectory_rows(trajectory, chosen)]


def trajectory_rows(trajectory: Trajectory, chosen: Chosen) -> list[ShippedRow]:
    done = trajectory.completed
    if len(trajectory.steps) == 1:
        (step,) = trajectory.steps.values()
        return [ShippedRow(trajectory, step, max(0, step.step_index), done, done)] if chosen(step) else []
    indexed = [(index, step) for index, step in trajectory.in_order() if chosen(step)]
    if not done or not indexed:
        return [ShippedRow(trajectory, step, index, False, False) for index, step in indexed]
    last = carrier = indexed[-1][1]
    if last.untrainable is not None:
        carrier = next((step for _, step in reversed(indexed) if step.untrainable is None), last)
    return [ShippedRow(trajectory, step, index, step is last, step is carrier) for index, step in indexed]


def own_mask(step: StoredStep) -> BoolArray | None:
    return step.mask


def ship(rows: Sequence[ShippedRow], token_mask: TokenMask = own_mask) -> Columns:
    """The rows as columns."""
    steps = [row.step for row in rows]
    scorers = [row.trajectory if _takes_the_rollouts_reward(row) else row.step for row in rows]
    return Columns(
        tokens=join([t.tokens.read(s.branch, s.prompt_length + s.response_length) for t, s, *_ in rows], np.int32),
        logprobs=join([_logprobs(step) for step in steps], np.float32),
        mask=_masks(steps, token_mask),
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
        untrainable=[step.untrainable for step in steps],
    )


def _takes_the_rollouts_reward(row: ShippedRow) -> bool:
    return row.carries_reward and row.step.reward is None and row.trajectory.reward is not None


def _metadata(row: ShippedRow) -> JsonObject:
    common, own = row.trajectory.metadata, row.step.metadata
    return {**common, **own} if common and own else common or own


def _logprobs(step: StoredStep) -> FloatArray:
    if step.logprobs is None:
        return np.full(step.response_length, np.nan, np.float32)
    return step.logprobs


def _masks(steps: Sequence[StoredStep], token_mask: TokenMask) -> BoolArray:
    masks = [token_mask(step) for step in steps]
    if all(mask is None for mask in masks):
        return np.ones(sum(step.response_length for step in steps), np.bool_)
    filled = [np.ones(s.response_length, np.bool_) if m is None else m for s, m in zip(steps, masks, strict=True)]
    return join(filled, np.bool_)
