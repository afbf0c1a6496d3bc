"""A trajectory in a few plain values: what is left of one that is gone, and what a Summary is made of.

Why not Summaries at once: every trajectory that goes leaves a sketch, watched or not, and a tuple is made in a moment.
"""

from typing import NamedTuple

from stepwell.pool.api.watching import State, Summary
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import trajectory_rows
from stepwell.pool.state.stored_step import HeldStep
from stepwell.steps.step import GRADES, Exactness

MARKS = "marks"
"""Where in a trajectory's metadata its marks are, so that trainers and exports see them."""


class Sketch(NamedTuple):
    """The fields of a Summary, but for the shard, which is known only outside it, and two more."""

    trajectory_uid: str
    prompt_uid: str
    channel: str
    source: str
    group: int
    group_size: int
    state: State
    cause: str
    steps: int
    quarantined: int
    untrainable: int
    tokens: int
    response_tokens: int
    reward: float | None
    reward_source: str
    oldest_version: int | None
    newest_version: int | None
    exactness: Exactness | None
    marks: tuple[str, ...]
    started_at: float
    changed_at: float
    note: str
    position: int
    """In the chronicle. This and the next are the shard's own affair."""
    revision: int
    """The number of the last reward given to it."""


def as_summary(sketch: tuple[object, ...], shard: str) -> Summary:
    fields = dict(zip(Sketch._fields, sketch, strict=True))
    del fields["position"], fields["revision"]
    return Summary(shard=shard, **fields | {"exactness": fields["exactness"] or ""})  # type: ignore[arg-type]


def draw(trajectory: Trajectory, state: State, cause: str = "", note: str = "") -> Sketch:
    group = trajectory.group
    quarantined = untrainable = tokens = responses = 0
    oldest: int | None = None
    newest: int | None = None
    worst: Exactness | None = None
    rewarded: HeldStep | None = None
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
        if step.exactness is not worst and (worst is None or GRADES[step.exactness] > GRADES[worst]):
            worst = step.exactness
        if step.reward is not None:
            rewarded = step
        if step.reward_revision > revision:
            revision = step.reward_revision
    scorer = trajectory if rewarded is None or trajectory.reward is not None else rewarded
    return Sketch(
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
        trajectory.reward if rewarded is None else earned(trajectory),
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


def earned(trajectory: Trajectory) -> float | None:
    """The rollout's reward and its steps' own together, as a trainer that takes all of them gets them."""
    rows = trajectory_rows(trajectory, lambda step: step.quarantine is None)
    own = [row.step.reward for row in rows if row.step.reward is not None]
    if trajectory.reward is not None and not any(row.carries_reward and row.step.reward is not None for row in rows):
        own.append(trajectory.reward)
    return sum(own) if own else None


def marks_of(trajectory: Trajectory) -> tuple[str, ...]:
    marks = trajectory.metadata.get(MARKS)
    return tuple(mark for mark in marks if isinstance(mark, str)) if isinstance(marks, list) else ()
