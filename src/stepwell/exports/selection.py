"""Which trajectories are exported: the same filters for a pool and for files.

Invariant: a rejected trajectory is not exported, also while a trainer still has it.
"""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from stepwell.pool.api.watching import MARKS, TrajectorySnapshot, TrajectoryState
from stepwell.steps.columns import Columns
from stepwell.steps.groups import StepGroup
from stepwell.steps.returns import take_apart
from stepwell.steps.step import GRADES, Exactness


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Bounds include their values. A trajectory without a reward, or a version, is within no bound of it."""

    channel: str | None = None
    source: str | None = None
    state: TrajectoryState | None = None
    mark: str | None = None
    min_exactness: Exactness | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    version_min: int | None = None
    version_max: int | None = None
    """A trajectory with several versions is within the bounds if one of them is, as on the dashboard."""
    since: float | None = None
    until: float | None = None

    def accepts(self, one: TrajectorySnapshot) -> bool:
        return (
            self.channel in (None, one.channel)
            and self.source in (None, one.source)
            and self.state in (None, one.state)
            and not _is_rejected(one)
            and (self.mark is None or self.mark in one.marks)
            and (self.min_exactness is None or _is_exact(one, self.min_exactness))
            and _is_within(one.reward, self.reward_min, self.reward_max)
            and _is_within(one.newest_version, self.version_min, None)
            and _is_within(one.oldest_version, None, self.version_max)
            and _is_within(one.started_at, self.since, self.until)
        )

    def of_group(self, group: StepGroup) -> StepGroup | None:
        """The accepted trajectories of a stored group; None if there are none."""
        trajectories = group.trajectories()
        accepted = [columns for columns in trajectories if self.accepts(snapshot_of_stored(columns, group))]
        if len(accepted) == len(trajectories):
            return group
        return group.only(accepted) if accepted else None

    async def of_groups(self, groups: Iterable[StepGroup]) -> AsyncIterator[StepGroup]:
        for group in groups:
            accepted = self.of_group(group)
            if accepted is not None:
                yield accepted


def snapshot_of_stored(columns: Columns, group: StepGroup) -> TrajectorySnapshot:
    """A stored trajectory counts as trained, because every trajectory of an archive was."""
    versions = [span.version for spans in columns.version_spans for span in spans]
    has_no_spans = [not spans for spans in columns.version_spans]
    versions += columns.policy_versions_S[has_no_spans].tolist()
    worst: Exactness = max(columns.exactness, key=GRADES.__getitem__)
    return TrajectorySnapshot(
        trajectory_uid=columns.trajectory_uids[0],
        prompt_uid=columns.prompt_uids[0],
        channel=group.channel,
        source=group.source,
        shard="",
        group=0,
        group_size=0,
        state=TrajectoryState.TRAINED,
        steps=len(columns),
        reward=take_apart(columns).total(),
        oldest_version=min(versions),
        newest_version=max(versions),
        exactness=worst,
        marks=_marks(columns),
        started_at=float(columns.started_at_S.min()),
    )


def _marks(columns: Columns) -> tuple[str, ...]:
    marks = columns.metadata[-1].get(MARKS)
    return tuple(str(mark) for mark in marks) if isinstance(marks, list) else ()


def _is_rejected(one: TrajectorySnapshot) -> bool:
    """Dropped, or to be dropped when its lease ends: then it has a note that says who rejected it."""
    return one.state is TrajectoryState.DROPPED or (one.state is TrajectoryState.LEASED and bool(one.note))


def _is_exact(one: TrajectorySnapshot, least: Exactness) -> bool:
    return bool(one.exactness) and Exactness(one.exactness).at_least(least)


def _is_within(value: float | None, least: float | None, most: float | None) -> bool:
    if value is None:
        return least is None and most is None
    return (least is None or value >= least) and (most is None or value <= most)
