"""Which trajectory a session is in, and which sessions have ended because nobody called."""

from dataclasses import replace

from stepwell.errors import Conflict
from stepwell.pool.api.producing import ENDED_BY, EndResult, Registration
from stepwell.pool.api.sessions import IDLE, SESSION, SessionCall, SessionPlace, session_metadata
from stepwell.pool.rules.ingest import Ingest
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.session_index import SessionRecord


class Sessions:
    def __init__(self, state: PoolState, ingest: Ingest) -> None:
        self._state = state
        self._ingest = ingest

    def is_elsewhere(self, call: SessionCall) -> bool:
        """Must another shard be asked for it?"""
        opened = self._open_trajectory(self._state.sessions.find(call.session_id))
        return self._state.is_elsewhere(opened.uid if opened is not None else "", call.prompt_uid)

    def place(self, call: SessionCall) -> SessionPlace | None:
        """The open trajectory of a session; a new one if none is open. Without `opens`, the last one."""
        record = self._state.sessions.find(call.session_id)
        opened = self._open_trajectory(record)
        if opened is not None:
            self._state.touch_session(opened)
            return SessionPlace(opened.uid, opened.group.channel)
        if not call.opens:
            return None if record is None else SessionPlace(record.trajectory_uid, record.channel)
        self._state.tombstones.check_user(call.user)
        registration = self._registration(call, record)
        try:
            self._ingest.register(registration)
        except Conflict:  # the shard has lost the session, but not its first trajectory
            registration = self._registration(replace(call, after=call.after or call.session_id), record)
            self._ingest.register(registration)
        group = self._state.trajectories[registration.trajectory_uid].group
        return SessionPlace(registration.trajectory_uid, group.channel)

    def idle(self) -> list[Trajectory]:
        """Open trajectories of sessions that had no call for so long that they end."""
        idle = self._state.limits.session_idle
        if idle is None:
            return []
        found = self._state.sessions.idle_since(self._state.pool_time - idle)
        return [self._state.trajectories[uid] for uid in found]

    def end_idle(self, trajectory: Trajectory) -> EndResult:
        """Complete it. What else ended it, if anything did, is kept."""
        failure = "" if ENDED_BY in trajectory.metadata else IDLE
        self._state.count_idle_end()
        return self._ingest.complete(trajectory.uid, trajectory.group.prompt_uid, failure=failure)

    def _open_trajectory(self, record: SessionRecord | None) -> Trajectory | None:
        trajectory = None if record is None else self._state.trajectories.get(record.trajectory_uid)
        is_open = trajectory is not None and not trajectory.completed and trajectory.is_at_home
        return trajectory if is_open else None

    def _registration(self, call: SessionCall, record: SessionRecord | None) -> Registration:
        predecessor = record.trajectory_uid if record is not None else call.after
        metadata = call.metadata or {} if record is None else record.metadata
        user = call.user or (record.user if record is not None else "")
        return Registration(
            call.new_uid if predecessor else call.session_id,
            call.prompt_uid,
            channel=call.channel if record is None else record.channel,
            group_size=1,
            metadata={**metadata, SESSION: session_metadata(call.session_id, user, predecessor)},
        )
