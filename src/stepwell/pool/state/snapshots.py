"""A trajectory in a few plain values: what is left of one that is gone, and what a Summary is made of.

Why not Summaries at once: every trajectory that goes leaves a sketch, watched or not, and a tuple is made in a moment.
"""

from typing import Literal

from stepwell.pool.api.curation import MARKS
from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import trajectory_rows
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import GRADES, Exactness


def snapshot_of(trajectory: Trajectory, state: TrajectoryState, cause: str = "", note: str = "") -> TrajectorySnapshot:
    group = trajectory.group
    quarantined = untrainable = tokens = responses = 0
    oldest: int | None = None
    newest: int | None = None
    worst: Exactness | Literal[""] = ""
    rewarded: StoredStep | None = None
    revision = trajectory.reward_revision
    for step in trajectory.steps.values():
        if step.quarantine is not None:
            quarantined += 1
            continue
        tokens += step.prompt_length + step.response_length
        responses += step.response_length
        first = last = step.policy_version
        if step.version_spans:
            first, last = step.oldest_version, max(span.version for span in step.version_spans)
        if oldest is None or first < oldest:
            oldest = first
        if newest is None or last > newest:
            newest = last
        if step.untrainable is not None:
            untrainable += 1
        if step.exactness is not worst and (not worst or GRADES[step.exactness] > GRADES[worst]):
            worst = step.exactness
        if step.reward is not None:
            rewarded = step
        if step.reward_revision > revision:
            revision = step.reward_revision
    scorer = trajectory if rewarded is None or trajectory.reward is not None else rewarded
    return TrajectorySnapshot(
        trajectory.uid,
        group.prompt_uid,
        group.channel,
        group.source,
        group.seq,
        group.size,
        state,
        cause,
        len(trajectory.steps),
        quarantined,
        untrainable,
        tokens,
        responses,
        trajectory.reward if rewarded is None else total_reward(trajectory),
        scorer.reward_source,
        oldest,
        newest,
        worst,
        marks_of(trajectory) if MARKS in trajectory.metadata else (),
        group.opened_at,
        trajectory.changed_at,
        note,
        trajectory.position,
        revision + trajectory.late_rewards,
    )


def total_reward(trajectory: Trajectory) -> float | None:
    """The rollout's reward and its steps' own together, as a trainer that takes all of them gets them."""
    rows = trajectory_rows(trajectory, lambda step: step.quarantine is None)
    own = [row.step.reward for row in rows if row.step.reward is not None]
    if trajectory.reward is not None and not any(row.carries_reward and row.step.reward is not None for row in rows):
        own.append(trajectory.reward)
    return sum(own) if own else None


def marks_of(trajectory: Trajectory) -> tuple[str, ...]:
    marks = trajectory.metadata.get(MARKS)
    return tuple(mark for mark in marks if isinstance(mark, str)) if isinstance(marks, list) else ()
