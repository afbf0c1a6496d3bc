"""What watchers read: changes, and the steps of single trajectories.

Reading changes nothing, and costs what is shown, not what is held.
"""

from collections.abc import Sequence
from dataclasses import replace

from stepwell.pool.api.watching import TrajectorySnapshot
from stepwell.pool.state.change_log import ChangeLogPage, is_sound, note_of, snapshot_of, standing_of
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.shipment import ship, trajectory_rows
from stepwell.pool.state.state_base import StateBase
from stepwell.steps.columns import Columns, pack, stack, unpack


class PoolView:
    def __init__(self, state: StateBase) -> None:
        self._state = state

    def page(self, position: int, limit: int) -> ChangeLogPage:
        """At most `limit` trajectories that changed after `position`."""
        return self._state.change_log.page(position, limit, self._snapshot)

    def read(self, uids: Sequence[tuple[str, str]]) -> tuple[Columns, list[int]]:
        """All steps of these (trajectory_uid, prompt_uid), in order, and the number of steps of each: 0 if not held.

        Quarantined steps are included while they are kept for inspection.
        """
        parts = [self._read(*uid) for uid in uids]
        found = [part for part in parts if part is not None]
        return stack(found) if found else pack([]), [0 if part is None else len(part) for part in parts]

    def _read(self, trajectory_uid: str, prompt_uid: str) -> Columns | None:
        trajectory = self._state.trajectories.get(trajectory_uid) or self._state.history.get(trajectory_uid)
        if trajectory is None or trajectory.group.prompt_uid != prompt_uid:
            return None
        with trajectory.read_only():
            return self._with_quarantined(trajectory, ship(trajectory_rows(trajectory, is_sound)))

    def _with_quarantined(self, trajectory: Trajectory, columns: Columns) -> Columns:
        indexes = {step.identity: index for index, step in trajectory.in_order() if step.quarantine is not None}
        if not indexes:
            return columns
        kept = [
            replace(step, step_index=indexes[step.identity])
            for step in self._state.quarantine
            if step.trajectory_uid == trajectory.uid and step.identity in indexes
        ]
        steps = sorted([*unpack(columns, copy=False), *kept], key=lambda step: step.step_index)
        return pack(steps)

    def _snapshot(self, trajectory: Trajectory) -> TrajectorySnapshot:
        channel = self._state.channel_of(trajectory.group)
        with trajectory.read_only():
            state, cause = standing_of(trajectory, channel, require_reward=self._state.limits.require_reward)
            snapshot = snapshot_of(trajectory, state, cause, note=note_of(trajectory))
        remark, kept = self._state.remark_on(trajectory), self._state.why_kept(trajectory.group)
        return snapshot._replace(remark=remark, kept=kept) if remark or kept else snapshot
