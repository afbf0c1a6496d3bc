"""The order of changes: how a watcher follows a pool of any size without reading all of it again.

- A trajectory has one position in the log: that of its last change. A watcher that has read up to a position reads only
  what follows it.
- An entry moves to the end of the log only if a reader has already seen it; repeated changes in between cost nothing.
- Memory follows the number of held trajectories, plus a limited number of those that are gone.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.records import Trajectory

SLACK = 1024
TakeSnapshot: TypeAlias = Callable[[Trajectory], TrajectorySnapshot]


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
        self._last = 0
        self._read = 0
        """The newest position that a reader has seen."""

    @property
    def last_position(self) -> int:
        return self._last

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
        """Of a trajectory that is gone."""
        return self._gone.get(trajectory_uid)

    @property
    def gone(self) -> Collection[str]:
        """The trajectories that are gone and have a snapshot."""
        return self._gone.keys()

    def remove(self, trajectory_uid: str) -> None:
        """Of a trajectory that is gone, no snapshot is kept."""
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
        self._last += 1
        self._positions.append(self._last)
        self._uids.append(uid)
        if len(self._uids) > 2 * (len(self._held) + len(self._gone)) + SLACK:
            self._remove_dead_entries(uid)
        return self._last

    def _remove_dead_entries(self, newest: str) -> None:
        """The trajectory of the newest entry does not have its new position yet."""
        live = [
            (position, uid)
            for position, uid in zip(self._positions, self._uids, strict=True)
            if self._position_of(uid) == position or (uid == newest and position == self._last)
        ]
        self._positions = [position for position, _ in live]
        self._uids = [uid for _, uid in live]

    def _position_of(self, uid: str) -> int:
        held = self._held.get(uid)
        if held is not None:
            return held.position
        return self._gone[uid].position if uid in self._gone else 0
