"""What watchers read: changes, time series, and the steps of single trajectories.

Reading changes nothing, and costs what is shown, not what is held.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from stepwell.pool.api.plan import Limits
from stepwell.pool.api.series import SeriesChunk
from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.pool.state.change_log import ChangeLog, ChangeLogPage
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.series import SeriesRecorder
from stepwell.pool.state.shipment import ship, trajectory_rows
from stepwell.pool.state.snapshots import snapshot_of, standing_of
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.columns import Columns, pack, stack, unpack
from stepwell.steps.step import Step


class PoolView:
    def __init__(
        self,
        limits: Limits,
        channels: Mapping[str, Channel],
        held: Mapping[str, Trajectory],
        history: Mapping[str, Trajectory],
        quarantine: Iterable[Step],
        log: ChangeLog,
        series: SeriesRecorder,
    ) -> None:
        self._limits = limits
        self._channels = channels
        self._held = held
        self._history = history
        self._quarantine = quarantine
        self._log = log
        self._series = series

    def misses(self, position: int) -> bool:
        """Must a reader that has read up to this position start again?"""
        return self._log.misses(position)

    def page(self, position: int, limit: int) -> ChangeLogPage:
        """At most `limit` trajectories that changed after `position`."""
        return self._log.page(position, limit, self._snapshot)

    def last_snapshot(self, trajectory_uid: str) -> TrajectorySnapshot | None:
        """Of a trajectory that is gone; None if it is unknown or forgotten."""
        return self._log.last_snapshot(trajectory_uid)

    def series(self, seconds: float) -> SeriesChunk:
        return self._series.chunk(seconds)

    def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """All steps of these (trajectory_uid, prompt_uid), in order, and the number of steps of each: 0 if not held.

        Quarantined steps are included while they are kept for inspection.
        """
        parts = [self._read(*uid) for uid in uids]
        found = [part for part in parts if part is not None]
        return stack(found) if found else pack([]), [0 if part is None else len(part) for part in parts]

    def _read(self, trajectory_uid: str, prompt_uid: str) -> Columns | None:
        trajectory = self._held.get(trajectory_uid) or self._history.get(trajectory_uid)
        if trajectory is None or trajectory.group.prompt_uid != prompt_uid:
            return None
        columns = ship(trajectory_rows(trajectory, _is_sound))
        return self._with_quarantined(trajectory, columns)

    def _with_quarantined(self, trajectory: Trajectory, columns: Columns) -> Columns:
        indexes = {step.identity: index for index, step in trajectory.in_order() if step.quarantine is not None}
        if not indexes:
            return columns
        kept = [
            replace(step, step_index=indexes[step.identity])
            for step in self._quarantine
            if step.trajectory_uid == trajectory.uid and step.identity in indexes
        ]
        steps = sorted([*unpack(columns, copy=False), *kept], key=lambda step: step.step_index)
        return pack(steps)

    def _snapshot(self, trajectory: Trajectory) -> TrajectorySnapshot:
        channel = self._channels[trajectory.group.channel]
        state, cause = standing_of(trajectory, channel, require_reward=self._limits.require_reward)
        return snapshot_of(trajectory, state, cause, note=trajectory.rejected or "")


def _is_sound(step: StoredStep) -> bool:
    return step.quarantine is None
