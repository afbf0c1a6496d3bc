"""What the pool shows of itself: how single trajectories stand, what they hold, and how time went by.

What always holds: looking changes nothing, and costs what is shown, not what is held.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepwell.pool.api.leasing import Unit
from stepwell.pool.api.series import SeriesChunk
from stepwell.pool.api.watching import REWARD, ROLLOUTS, TrajectorySnapshot, TrajectoryState
from stepwell.pool.state.change_log import ChangeLogPage
from stepwell.pool.state.channel_index import ChannelIndex
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import ship, trajectory_rows
from stepwell.pool.state.snapshots import snapshot_of
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns, pack, stack, unpack
from stepwell.steps.step import Step


class PoolView:
    def __init__(self, books: PoolState, quarantine: Iterable[Step]) -> None:
        self._books = books
        self._quarantine = quarantine

    def misses(self, position: int) -> bool:
        """Must whoever has read up to there begin anew?"""
        return self._books.chronicle.misses(position)

    def page(self, position: int, limit: int) -> ChangeLogPage:
        """The trajectories that have changed after `position`, up to so many."""
        return self._books.chronicle.page(position, limit, self._look)

    def series(self, seconds: float) -> SeriesChunk:
        return self._books.timeline.strip(seconds)

    def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """All steps of those (trajectory_uid, prompt_uid), in order, and how many each has: 0 if it is not held.

        Of quarantined steps, those that are still kept for inspection.
        """
        parts = [self._read(*uid) for uid in uids]
        found = [part for part in parts if part is not None]
        return stack(found) if found else pack([]), [0 if part is None else len(part) for part in parts]

    def _read(self, trajectory_uid: str, prompt_uid: str) -> Columns | None:
        books = self._books
        trajectory = books.trajectories.get(trajectory_uid) or books.history.get(trajectory_uid)
        if trajectory is None or trajectory.group.prompt_uid != prompt_uid:
            return None
        columns = ship(trajectory_rows(trajectory, _is_sound))
        return self._with_quarantined(trajectory, columns)

    def _with_quarantined(self, trajectory: Trajectory, columns: Columns) -> Columns:
        places = {step.identity: index for index, step in trajectory.in_order() if step.quarantine is not None}
        if not places:
            return columns
        kept = [
            replace(step, step_index=places[step.identity])
            for step in self._quarantine
            if step.trajectory_uid == trajectory.uid and step.identity in places
        ]
        steps = sorted([*unpack(columns, copy=False), *kept], key=lambda step: step.step_index)
        return pack(steps)

    def _look(self, trajectory: Trajectory) -> TrajectorySnapshot:
        state, cause = self._standing(trajectory, self._books.channels[trajectory.group.channel])
        return snapshot_of(trajectory, state, cause, note="" if trajectory.rejected is None else trajectory.rejected)

    def _standing(self, trajectory: Trajectory, channel: ChannelIndex) -> tuple[TrajectoryState, str]:
        group, needs_reward = trajectory.group, self._books.limits.require_reward
        if group.lease is not None or (channel.unit is Unit.STEPS and _has_steps_out(trajectory)):
            return TrajectoryState.LEASED, ""
        if not trajectory.completed:
            return TrajectoryState.OPEN, ""
        if group.key in channel.ready:
            return TrajectoryState.READY, ""
        if needs_reward and not trajectory.is_scored():
            return TrajectoryState.WAITING, REWARD
        if channel.unit in (Unit.TRAJECTORIES, Unit.STEPS):
            return TrajectoryState.READY, ""
        return TrajectoryState.WAITING, ROLLOUTS if group.completed < group.size else REWARD


def _is_sound(step: StoredStep) -> bool:
    return step.quarantine is None


def _has_steps_out(trajectory: Trajectory) -> bool:
    return any(step.lease is not None for step in trajectory.steps.values())
