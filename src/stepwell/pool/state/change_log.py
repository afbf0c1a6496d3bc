"""Snapshots of trajectories, and the order of changes: how a watcher follows a pool of any size.

- A trajectory has one position in the log: that of its last change. A watcher that has read up to a position reads only
  what follows it.
- An entry moves to the end of the log only if a reader has already seen it; repeated changes in between cost nothing.
- Memory follows the number of held trajectories, plus a limited number of those that are gone.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.producing import ENDED_BY
from stepwell.pool.api.watching import MARKS, REWARD, ROLLOUTS, TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.records import Trajectory, marks_of
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import GRADES, Exactness
from stepwell.steps.trainable import INCOMPLETE

SLACK = 1024
TakeSnapshot: TypeAlias = Callable[[Trajectory], TrajectorySnapshot]


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


class ChangeLogPage(NamedTuple):
    """Each trajectory once, the oldest change first."""

    snapshots: list[TrajectorySnapshot]
    position: int
    """The position of the last entry."""
    more: bool


class ChangeLog:
    def __init__(self, held: Mapping[str, Trajectory], gone_kept: int) -> None:
        self.now = 0.0
        self._held = held
        self._gone: OrderedDict[str, TrajectorySnapshot] = OrderedDict()
        """The last trajectories that are gone."""
        self._gone_kept = gone_kept
        self._evicted = 0
        """The newest position of a snapshot that was evicted from `_gone`."""
        self._positions: list[int] = []
        """In order. An entry is dead if its trajectory has another position by now."""
        self._uids: list[str] = []
        """The trajectory of each entry."""
        self.last_position = 0
        self._read = 0
        """The newest position that a reader has seen."""

    def record(self, trajectory: Trajectory) -> None:
        trajectory.changed_at = self.now
        if trajectory.position <= self._read:
            trajectory.position = self._append(trajectory.uid)

    def record_all(self, trajectories: Iterable[Trajectory]) -> None:
        now, read = self.now, self._read
        for trajectory in trajectories:
            trajectory.changed_at = now
            if trajectory.position <= read:
                trajectory.position = self._append(trajectory.uid)

    def end(
        self, trajectory: Trajectory, state: TrajectoryState, cause: str = "", note: str = ""
    ) -> TrajectorySnapshot:
        """The trajectory is gone, or the last snapshot of one that is gone has changed."""
        self.record(trajectory)
        snapshot = snapshot_of(trajectory, state, cause, note)
        self._gone[trajectory.uid] = snapshot
        if len(self._gone) > self._gone_kept:
            _, oldest = self._gone.popitem(last=False)
            self._evicted = max(self._evicted, oldest.position)
        return snapshot

    def last_snapshot(self, trajectory_uid: str) -> TrajectorySnapshot | None:
        """Returns the last snapshot of a trajectory that is gone, if it is kept."""
        return self._gone.get(trajectory_uid)

    @property
    def gone(self) -> Collection[str]:
        """The trajectories that are gone and have a snapshot."""
        return self._gone.keys()

    def remove(self, trajectory_uid: str) -> None:
        """Removes the snapshot of a trajectory that is gone."""
        self._gone.pop(trajectory_uid, None)

    def misses(self, position: int) -> bool:
        """Was an entry after that position evicted? Then a reader that has read up to there must start again."""
        return position < self._evicted

    def page(self, position: int, limit: int, take_snapshot: TakeSnapshot) -> ChangeLogPage:
        """At most `limit` changes after `position`. Held trajectories are shown as they are now."""
        snapshots: list[TrajectorySnapshot] = []
        at = bisect_right(self._positions, position)
        while at < len(self._uids) and len(snapshots) < limit:
            position = self._positions[at]
            snapshot = self._snapshot_at(position, self._uids[at], take_snapshot)
            if snapshot is not None:
                snapshots.append(snapshot)
            at += 1
        self._read = max(self._read, position)
        return ChangeLogPage(snapshots, position, at < len(self._uids))

    def _snapshot_at(self, position: int, uid: str, take_snapshot: TakeSnapshot) -> TrajectorySnapshot | None:
        held = self._held.get(uid)
        if held is not None:
            return take_snapshot(held) if held.position == position else None
        gone = self._gone.get(uid)
        return gone if gone is not None and gone.position == position else None

    def _append(self, uid: str) -> int:
        self.last_position += 1
        self._positions.append(self.last_position)
        self._uids.append(uid)
        if len(self._uids) > 2 * (len(self._held) + len(self._gone)) + SLACK:
            self._remove_dead_entries(uid)
        return self.last_position

    def _remove_dead_entries(self, newest: str) -> None:
        """The trajectory of the newest entry does not have its new position yet."""
        live = [
            (position, uid)
            for position, uid in zip(self._positions, self._uids, strict=True)
            if self._position_of(uid) == position or (uid == newest and position == self.last_position)
        ]
        self._positions = [position for position, _ in live]
        self._uids = [uid for _, uid in live]

    def _position_of(self, uid: str) -> int:
        held = self._held.get(uid)
        if held is not None:
            return held.position
        return self._gone[uid].position if uid in self._gone else 0
