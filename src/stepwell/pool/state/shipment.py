"""Held steps on their way to a trainer: in order, indexed, the last one marked, one carrying the rollout's reward.

What always holds: the reward is on the last row that is not marked untrainable, for a side call must not earn what the
task did; where all are marked, on the last.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from stepwell.pool.state.records import Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import NO_BASE, Bases, Columns, join
from stepwell.steps.schema import CARRIED
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


ROW_TRAJECTORY = attrgetter("trajectory")
NOTHING_SHARED = (NO_BASE, 0)


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


def ship(rows: Sequence[ShippedRow], token_mask: TokenMask = own_mask, *, separate: bool = False) -> Columns:
    """The rows as columns, with their prefix tree. If they are `separate`, each row is a group of its own."""
    steps = [row.step for row in rows]
    scorers = [row.trajectory if _takes_the_rollouts_reward(row) else row.step for row in rows]
    bases = [NOTHING_SHARED] * len(rows) if separate else _bases(rows)
    tokens = [t.tokens.read(s.branch, s.tokens, shared) for (t, s, *_), (_, shared) in zip(rows, bases, strict=True)]
    carried = zip(*(step.carried for step in steps), strict=True) if steps else ((),) * len(CARRIED)
    bases_2_S = np.array(bases, np.int32).reshape(-1, 2).T
    return Columns(
        added=join(tokens, np.int32),
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
        quarantine=[step.quarantine for step in steps],
        untrainable=[step.untrainable for step in steps],
        carried={column.packed: list(values) for column, values in zip(CARRIED, carried, strict=True)},
        bases=Bases(bases_2_S[0], bases_2_S[1]),
    )


def _bases(rows: Sequence[ShippedRow]) -> list[tuple[int, int]]:
    """Which earlier row each row begins with, and how many tokens they share. A step that is not shipped is no base."""
    found: list[tuple[int, int]] = []
    for trajectory, run in groupby(rows, key=ROW_TRAJECTORY):
        steps = [row.step for row in run]
        if len(steps) == 1:
            found.append(NOTHING_SHARED)
            continue
        first = len(found)
        bases = trajectory.tokens.bases([(step.branch, step.tokens) for step in steps])
        found += [(base if base == NO_BASE else first + base, shared) for base, shared in bases]
    return found


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
