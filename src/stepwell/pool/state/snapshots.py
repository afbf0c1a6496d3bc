"""Snapshots of trajectories: what watchers see, and what is left of a trajectory that is gone."""

from typing import Literal

from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.producing import ENDED_BY
from stepwell.pool.api.watching import MARKS, REWARD, ROLLOUTS, TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import GRADES, Exactness
from stepwell.steps.trainable import INCOMPLETE


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
            first, last = step.oldest_version, step.newest_version
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
        trajectory.reward if rewarded is None else trajectory.total_return(),
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


def note_of(trajectory: Trajectory) -> str:
    """Who rejected it and why, or that it lacks calls, or how it ended, if a person or its failure did that."""
    ended_by, lost = trajectory.metadata.get(ENDED_BY), len(trajectory.lost_calls)
    missing = f"{INCOMPLETE}: {lost} of its calls {'is' if lost == 1 else 'are'} missing" if lost else ""
    return trajectory.rejected or missing or (f"ended by {ended_by}" if ended_by else "")


def is_sound(step: StoredStep) -> bool:
    return step.quarantine is None


def marks_of(trajectory: Trajectory) -> tuple[str, ...]:
    marks = trajectory.metadata.get(MARKS)
    return tuple(mark for mark in marks if isinstance(mark, str)) if isinstance(marks, list) else ()


def standing_of(trajectory: Trajectory, channel: Channel, *, require_reward: bool) -> tuple[TrajectoryState, str]:
    """The state of a held trajectory, and its cause."""
    group = trajectory.group
    steps = trajectory.steps.values() if channel.unit is Unit.STEPS else ()
    if group.lease is not None or any(step.lease is not None for step in steps):
        return TrajectoryState.LEASED, ""
    if not trajectory.completed:
        return TrajectoryState.OPEN, ""
    if channel.is_ready(group):
        return TrajectoryState.READY, ""
    if require_reward and not trajectory.has_its_rewards():
        return TrajectoryState.WAITING, REWARD
    if channel.unit in (Unit.TRAJECTORIES, Unit.STEPS):
        return TrajectoryState.READY, ""
    return TrajectoryState.WAITING, ROLLOUTS if group.completed < group.size else REWARD
