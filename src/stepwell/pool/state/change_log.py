"""What changed, in order: how a watcher reads a pool of any size without asking for all of it again.

A trajectory has one position, that of its last change; whoever has read up to a position has only what is beyond it to
read. What always holds: what no one has read since it last changed need not move when it changes again, so that a pool
that is not watched pays next to nothing; memory follows what is held and the bound on what is gone.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from stepwell.pool.api.watching import TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.snapshots import snapshot_of

SLACK = 1024
Look: TypeAlias = Callable[[Trajectory], TrajectorySnapshot]


class ChangeLogPage(NamedTuple):
    """What a reader gets: each trajectory once, the oldest change first."""

    snapshots: list[TrajectorySnapshot]
    position: int
    """How far this goes."""
    more: bool


class ChangeLog:
    def __init__(self, held: Mapping[str, Trajectory], gone_kept: int) -> None:
        self.now = 0.0
        self._held = held
        self._gone: OrderedDict[str, TrajectorySnapshot] = OrderedDict()
        """The last that went."""
        self._gone_kept = gone_kept
        self._forgotten = 0
        """The newest position of one that went and is no longer kept."""
        self._positions: list[int] = []
        """In order, and whose each was; one that has another position by now is chaff."""
        self._uids: list[str] = []
        self._last = 0
        self._read = 0
        """The newest position that anyone has read."""

    def touch(self, trajectory: Trajectory) -> None:
        """It has changed."""
        trajectory.changed_at = self.now
        if trajectory.position <= self._read:
            trajectory.position = self._add(trajectory.uid)

    def touch_all(self, trajectories: Iterable[Trajectory]) -> None:
        now, read = self.now, self._read
        for trajectory in trajectories:
            trajectory.changed_at = now
            if trajectory.position <= read:
                trajectory.position = self._add(trajectory.uid)

    def end(
        self, trajectory: Trajectory, state: TrajectoryState, cause: str = "", note: str = ""
    ) -> TrajectorySnapshot:
        """It is gone, or what is told of one that is gone has changed."""
        self.touch(trajectory)
        sketch = snapshot_of(trajectory, state, cause, note)
        self._gone[trajectory.uid] = sketch
        if len(self._gone) > self._gone_kept:
            _, oldest = self._gone.popitem(last=False)
            self._forgotten = max(self._forgotten, oldest.position)
        return sketch

    def last_of(self, trajectory_uid: str) -> TrajectorySnapshot | None:
        """What is known of one that is gone."""
        return self._gone.get(trajectory_uid)

    def misses(self, position: int) -> bool:
        """Has anything after that position been forgotten? Then whoever has read up to there must begin anew."""
        return position < self._forgotten

    def page(self, position: int, limit: int, look: Look) -> ChangeLogPage:
        """What changed after `position`, up to so many. What is held is looked at as it is now."""
        found: list[TrajectorySnapshot] = []
        at = bisect_right(self._positions, position)
        while at < len(self._uids) and len(found) < limit:
            position = self._positions[at]
            sketch = self._at(position, self._uids[at], look)
            if sketch is not None:
                found.append(sketch)
            at += 1
        self._read = max(self._read, position)
        return ChangeLogPage(found, position, at < len(self._uids))

    def _at(self, position: int, uid: str, look: Look) -> TrajectorySnapshot | None:
        held = self._held.get(uid)
        if held is not None:
            return look(held) if held.position == position else None
        gone = self._gone.get(uid)
        return gone if gone is not None and gone.position == position else None

    def _add(self, uid: str) -> int:
        self._last += 1
        self._positions.append(self._last)
        self._uids.append(uid)
        if len(self._uids) > 2 * (len(self._held) + len(self._gone)) + SLACK:
            self._sweep(uid)
        return self._last

    def _sweep(self, newest: str) -> None:
        """Let go of the chaff; the newest does not have its position yet."""
        kept = [
            (position, uid)
            for position, uid in zip(self._positions, self._uids, strict=True)
            if self._position_of(uid) == position or (uid == newest and position == self._last)
        ]
        self._positions = [position for position, _ in kept]
        self._uids = [uid for _, uid in kept]

    def _position_of(self, uid: str) -> int:
        held = self._held.get(uid)
        if held is not None:
            return held.position
        return self._gone[uid].position if uid in self._gone else 0
