"""Stored steps as a trainer gets them: in order, indexed, the last one flagged, with the return of their trajectory.

- The return is that of the whole trajectory, whichever of its steps are shipped.
- A step keeps its own reward. The last row that is not marked untrainable shows the outcome reward if it has none of
  its own. If all are marked, the last row does.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from stepwell.pool.state.records import EXPLANATION, STEP_DETAILS, Group, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import NO_BASE, Columns, PrefixLinks, join, join_masks, pack_values
from stepwell.steps.layout import reward_carrier
from stepwell.steps.returns import NO_STEP, NOTHING_LEFT_OUT, LeftOutSteps
from stepwell.steps.step import CARRIED, OF_STEP, OF_TRAJECTORY, BoolArray, FloatArray, JsonObject

IsShipped: TypeAlias = Callable[[StoredStep], bool]
TokenMask: TypeAlias = Callable[[StoredStep], BoolArray | None]
"""Which response tokens of a step are trained; None means all."""
own_mask: TokenMask = attrgetter("mask")
CARRIED_OF, LENGTHS = attrgetter("carried"), attrgetter("prompt_length", "response_length")


class ShippedRow(NamedTuple):
    trajectory: Trajectory
    step: StoredStep
    step_index: int
    is_last: bool
    shows_outcome: bool
    """It has no reward of its own and shows the trajectory's outcome reward."""


def group_rows(group: Group, is_shipped: IsShipped) -> list[ShippedRow]:
    rows: list[ShippedRow] = []
    for trajectory in group.trajectories.values():
        rows += trajectory_rows(trajectory, is_shipped)
    return rows


def trajectory_rows(trajectory: Trajectory, is_shipped: IsShipped) -> list[ShippedRow]:
    done, steps = trajectory.completed, trajectory.steps
    if len(steps) == 1:
        (step,) = steps.values()
        if not is_shipped(step):
            return []
        is_shown = step.reward is None and trajectory.reward is not None
        index = step.step_index
        return [ShippedRow(trajectory, step, 0 if index < 0 else index, done, is_shown)]
    indexed = [(index, step) for index, step in trajectory.in_order() if is_shipped(step)]
    if not indexed:
        return []
    last = carrier = indexed[-1][1]
    if last.untrainable is not None:
        carrier = indexed[reward_carrier([step.untrainable for _, step in indexed])][1]
    shows = carrier if carrier.reward is None and trajectory.reward is not None else None
    return [ShippedRow(trajectory, step, index, done and step is last, step is shows) for index, step in indexed]


def left_out_of(groups: Sequence[Group], rows_by_group: Sequence[Sequence[ShippedRow]]) -> LeftOutSteps:
    """What is in none of the groups' rows."""
    return _left_out(
        [
            (place, *left_out)
            for place, (group, rows) in enumerate(zip(groups, rows_by_group, strict=True))
            for left_out in _not_shipped(group.trajectories.values(), rows)
        ]
    )


def later_rewards(rows: Sequence[ShippedRow]) -> LeftOutSteps:
    """Returns the later steps of each row's trajectory that already have a reward. A row is a single step, and a group
    of its own."""
    return _left_out(
        [
            (place, row.trajectory, index, step)
            for place, row in enumerate(rows)
            if len(row.trajectory.steps) > 1
            for index, step in row.trajectory.in_order()
            if index > row.step_index and step.reward is not None and step.quarantine is None
        ]
    )


def _left_out(entries: Sequence[tuple[int, Trajectory, int, StoredStep | None]]) -> LeftOutSteps:
    """An entry is the number of a group, and a step of it with its trajectory and index."""
    if not entries:
        return NOTHING_LEFT_OUT
    return LeftOutSteps(
        group_of_E=np.array([place for place, *_ in entries], np.int64),
        trajectory_uids=[trajectory.uid for _, trajectory, *_ in entries],
        step_indexes_E=np.array([index for _, _, index, _ in entries], np.int32),
        rewards_E=np.array([step and step.reward for *_, step in entries], np.float64),
        returns_E=np.array([trajectory.total_return() for _, trajectory, *_ in entries], np.float64),
        outcomes_E=np.array([trajectory.reward for _, trajectory, *_ in entries], np.float64),
    )


def _not_shipped(
    trajectories: Collection[Trajectory], rows: Sequence[ShippedRow]
) -> list[tuple[Trajectory, int, StoredStep | None]]:
    counts = [len(trajectory.steps) for trajectory in trajectories]
    if sum(counts) == len(rows) and all(counts):
        return []
    shipped = {id(row.step) for row in rows}
    return [
        (trajectory, index, step)
        for trajectory in trajectories
        for index, step in (trajectory.in_order() if trajectory.steps else [(NO_STEP, None)])
        if id(step) not in shipped
    ]


def step_rows(steps: Iterable[tuple[Trajectory, StoredStep]], is_shipped: IsShipped) -> list[ShippedRow]:
    """Single steps. A step of an open trajectory does not show its outcome reward: a later one will."""
    return [
        row._replace(shows_outcome=row.shows_outcome and trajectory.completed)
        for trajectory, step in steps
        for row in trajectory_rows(trajectory, is_shipped)
        if row.step is step
    ]


def ship(
    rows: Sequence[ShippedRow],
    token_mask: TokenMask = own_mask,
    *,
    separate: bool = False,
) -> Columns:
    """The rows as columns, with their prefix tree. If they are `separate`, each row is a group of its own."""
    trajectories, steps = [row.trajectory for row in rows], [row.step for row in rows]
    rewarded = [row.trajectory if row.shows_outcome else row.step for row in rows]
    bases, shared = ([NO_BASE] * len(rows), [0] * len(rows)) if separate else _bases(rows)
    prompt_lengths, response_lengths = map(list, zip(*map(LENGTHS, steps), strict=True)) if steps else ([], [])
    tokens = [
        trajectory.tokens.read(step.branch, prompt + response, first)
        for trajectory, step, prompt, response, first in zip(
            trajectories, steps, prompt_lengths, response_lengths, shared, strict=True
        )
    ]
    carried = zip(*map(CARRIED_OF, steps), strict=True) if steps else ((),) * len(CARRIED)
    return Columns(
        added=join(tokens, np.int32),
        logprobs=join([_logprobs(step) for step in steps], np.float32),
        mask=join_masks(list(map(token_mask, steps)), response_lengths),
        prompt_lengths_S=np.array(prompt_lengths, np.int32),
        response_lengths_S=np.array(response_lengths, np.int32),
        rewards_S=np.array([owner.reward for owner in rewarded], np.float64),
        returns_S=np.array(_returns(rows), np.float64),
        outcomes_S=np.array([trajectory.reward for trajectory in trajectories], np.float64),
        reward_revisions_S=np.array([owner.reward_revision for owner in rewarded], np.int32),
        reward_sources=[owner.reward_source for owner in rewarded],
        rewards_of=[OF_TRAJECTORY if row.shows_outcome else "" if row.step.reward is None else OF_STEP for row in rows],
        step_indexes_S=np.array([row.step_index for row in rows], np.int32),
        policy_versions_S=np.array([step.policy_version for step in steps], np.int64),
        is_last_S=np.array([row.is_last for row in rows], np.bool_),
        started_at_S=np.array([step.started_at for step in steps], np.float64),
        trajectory_uids=[trajectory.uid for trajectory in trajectories],
        prompt_uids=[trajectory.group.prompt_uid for trajectory in trajectories],
        uids=[step.uid for step in steps],
        metadata=[
            _metadata(row) if row.step.metadata or EXPLANATION in row.trajectory.metadata else row.trajectory.metadata
            for row in rows
        ],
        version_spans=[step.version_spans for step in steps],
        exactness=[step.exactness for step in steps],
        quarantine=[step.quarantine for step in steps],
        untrainable=[step.untrainable for step in steps],
        models=[step.model for step in steps],
        carried={column.packed: pack_values(column, values) for column, values in zip(CARRIED, carried, strict=True)},
        bases=PrefixLinks(np.array(bases, np.int32), np.array(shared, np.int32)),
    )


def _bases(rows: Sequence[ShippedRow]) -> tuple[list[int], list[int]]:
    """Which earlier row each row begins with, and how many tokens they share. A step that is not shipped is no base."""
    if not any(len(row.trajectory.steps) > 1 for row in rows):
        return [NO_BASE] * len(rows), [0] * len(rows)
    bases: list[int] = []
    shared: list[int] = []
    forked: list[int] = []
    """The first rows of trajectories that have several branches."""
    trajectory, branch, first, base, longest = None, NO_BASE, 0, NO_BASE, 0
    for place, row in enumerate(rows):
        step = row.step
        length = step.prompt_length + step.response_length
        if row.trajectory is not trajectory:
            trajectory, branch, first, base, longest = row.trajectory, step.branch, place, NO_BASE, 0
        elif step.branch != branch and first not in forked[-1:]:
            forked.append(first)
        bases.append(base)
        if length > longest:
            shared.append(longest)
            base, longest = place, length
        else:
            shared.append(length)
    for first in forked:
        trajectory, end = rows[first].trajectory, first + 1
        while end < len(rows) and rows[end].trajectory is trajectory:
            end += 1
        sequences = [(step.branch, step.prompt_length + step.response_length) for _, step, *_ in rows[first:end]]
        bases[first:end], shared[first:end] = zip(*trajectory.tokens.bases(sequences, first), strict=True)
    return bases, shared


def _returns(rows: Sequence[ShippedRow]) -> list[float | None]:
    """The return of each row's trajectory, computed once for each."""
    returns: list[float | None] = []
    trajectory, total = None, None
    for row in rows:
        if row.trajectory is not trajectory:
            trajectory, total = row.trajectory, row.trajectory.reward
            if len(trajectory.steps) > 1 or row.step.reward is not None:
                total = trajectory.total_return()
        returns.append(total)
    return returns


def _metadata(row: ShippedRow) -> JsonObject:
    common, own = row.trajectory.metadata, row.step.metadata
    explanation = common.get(EXPLANATION)
    if isinstance(explanation, dict) and STEP_DETAILS in explanation:  # not those of the other steps
        shared = {name: value for name, value in explanation.items() if name != STEP_DETAILS}
        details = row.trajectory.step_details.get(row.step.identity, {})
        return {**common, EXPLANATION: {**shared, **details}, **own}
    return {**common, **own} if common else own


def _logprobs(step: StoredStep) -> FloatArray:
    if step.logprobs is None:
        return np.full(step.response_length, np.nan, np.float32)
    return step.logprobs
