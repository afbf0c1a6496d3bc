"""The sessions of a shard: which trajectory each is in, and when it was last called.

Sessions whose trajectories are gone are remembered in memory, within a bound. After a restart, those of which the pool
still holds a trajectory are known.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from stepwell.pool.api.producing import ENDED_BY
from stepwell.pool.api.sessions import SESSION, session_id_of, user_of
from stepwell.pool.api.watching import MARKS
from stepwell.pool.state.queues import PrioritySet
from stepwell.pool.state.records import Trajectory, json_bytes
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.step import JsonObject

RECORD_BYTES = 64 * 2**20
"""The most bytes of metadata of all remembered sessions, also of those whose trajectories are gone."""
OF_ONE_TRAJECTORY = (SESSION, ENDED_BY, MARKS)
"""Metadata that a successor does not take over."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The last trajectory of a session."""

    trajectory_uid: str
    number: int
    """Order of registration."""
    channel: str
    user: str
    metadata: JsonObject
    """What a successor takes over."""


class SessionIndex:
    def __init__(self, kept: int) -> None:
        """So many sessions and turns are remembered."""
        self.called: dict[str, float] = {}
        """By open trajectory of a session: when it was last called, in pool time."""
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()
        self._record_bytes = 0
        """Bytes of the metadata of all records."""
        self._by_time: PrioritySet[tuple[float, str]] = PrioritySet()
        """The open trajectories, each with a time of a call that is not later than its last one."""
        self._turns: OrderedDict[tuple[str, str], str] = OrderedDict()
        """By user, and digest of a conversation with its reply: the session."""
        self._kept = kept

    def find(self, session_id: str) -> SessionRecord | None:
        return self._records.get(session_id)

    def find_by_turn(self, user: str, replied: str) -> str:
        return self._turns.get((user, replied), "")

    def add_step(self, trajectory: Trajectory, step: StoredStep, pool_time: float) -> None:
        """A step of any trajectory."""
        if trajectory.uid in self.called:
            self.called[trajectory.uid] = pool_time
            self._note_turn(trajectory, step)

    def add(self, trajectory: Trajectory, pool_time: float) -> None:
        """A trajectory of any kind."""
        if session_id := session_id_of(trajectory.group.prompt_uid):
            known = self._records.get(session_id)
            if known is None or known.number <= trajectory.number:
                self._remember(session_id, _record(trajectory))
            if not trajectory.completed:
                self.called[trajectory.uid] = pool_time
                self._by_time.add((pool_time, trajectory.uid))

            for step in trajectory.steps.values():
                self._note_turn(trajectory, step)

    def _remember(self, session_id: str, record: SessionRecord) -> None:
        self._remove(session_id)
        self._records[session_id] = record
        self._record_bytes += json_bytes(record.metadata)
        while len(self._records) > self._kept or self._record_bytes > RECORD_BYTES:
            self._remove(next(iter(self._records)))

    def _remove(self, session_id: str) -> None:
        record = self._records.pop(session_id, None)
        if record is not None:
            self._record_bytes -= json_bytes(record.metadata)

    def _note_turn(self, trajectory: Trajectory, step: StoredStep) -> None:
        replied = step.lineage.get("replied") if step.quarantine is None else None
        if replied is not None:
            turn = user_of(trajectory.metadata), replied
            self._turns[turn] = session_id_of(trajectory.group.prompt_uid)
            self._turns.move_to_end(turn)
            if len(self._turns) > self._kept:
                self._turns.popitem(last=False)

    def touch(self, trajectory_uid: str, pool_time: float) -> None:
        if trajectory_uid in self.called:
            self.called[trajectory_uid] = pool_time

    def end(self, trajectory_uid: str) -> None:
        self.called.pop(trajectory_uid, None)

    def remove(self, is_wanted: Callable[[str, str], bool]) -> list[str]:
        """Remove the sessions for whose user and last trajectory this is true; their next call begins anew. The uid of
        the trajectory is empty if only the user is known. Returns the ids."""
        removed = [key for key, record in self._records.items() if is_wanted(record.user, record.trajectory_uid)]
        for session_id in removed:
            self._remove(session_id)
        gone, users = set(removed), {user for user in {user for user, _ in self._turns} if is_wanted(user, "")}
        for turn in [turn for turn, session_id in self._turns.items() if turn[0] in users or session_id in gone]:
            del self._turns[turn]
        return removed

    def idle_since(self, pool_time: float) -> list[str]:
        """The open trajectories whose last call was at that time or before."""
        idle: list[tuple[float, str]] = []
        while (first := self._by_time.first()) is not None and first[0] <= pool_time:
            self._by_time.discard(first)
            called = self.called.get(first[1])
            if called is not None and called <= pool_time:
                idle.append(first)
            elif called is not None:
                self._by_time.add((called, first[1]))
        for entry in idle:
            self._by_time.add(entry)
        return [uid for _, uid in idle]


def _record(trajectory: Trajectory) -> SessionRecord:
    metadata = {name: value for name, value in trajectory.metadata.items() if name not in OF_ONE_TRAJECTORY}
    user, group = user_of(trajectory.metadata), trajectory.group
    return SessionRecord(trajectory.uid, trajectory.number, group.channel, user, metadata)
