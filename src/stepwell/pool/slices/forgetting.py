"""Forgetting: everything of a subject, or everything that is too old, is removed from a pool for good.

- Here: what is asked of the shards, which data a tombstone removes, and its removal from the state of a shard. Doing it
  again is harmless. forgetting_work.py has the steps by which it leaves gateways, archive and journal.
- The tombstone of a subject has its digest. There is one more, for what is too old: it is of the last run, and has the
  names of that run. Later data of the same names is taken.
- Data is too old by the wall clock and, unless a person says that the clock is right, only after it has been here for
  as long while the pool ran.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, Any, Self

from stepwell.common.message_format import message
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.producing import SubmitVerdict
from stepwell.pool.api.sessions import RETENTION, session_prompt_uid
from stepwell.pool.shard.operation import LongOperation
from stepwell.pool.state.pool_state import PoolState
from stepwell.pool.state.records import Trajectory
from stepwell.pool.state.tombstones import AGE, DIGEST_SIZE, OLDER_THAN, Tombstone, Tombstones, names_of
from stepwell.steps.groups import lineage_name
from stepwell.steps.step import JsonObject, Step

if TYPE_CHECKING:
    from stepwell.pool.shard.archive_files import ArchivedRow
    from stepwell.pool.shard.shard import Shard

FORGETTING = "forgetting"
"""The name of the slice in forgetting_work.py."""

EXPIRED = "expired"
"""The cause of steps that were removed because of their age. With their subject, it is the verdict of later ones."""
RUNNING_TIME = "running_time"
"""In `removed`: True if data is too old only after it has been here for as long while the pool ran. The wall clock may
be wrong."""
REMOVED = ("trajectories", "files", "late_rewards", "quarantined")
ENTRIES = "_entries"
"""In `removed`, after the name of a slice: how many rows of it."""
QUEUE, LEASE, HISTORY = "queue", "lease", "history"
"""Where a removed trajectory was."""
PIECE_BYTES = 2**21
"""Bytes of trajectories that are removed at once: other calls wait meanwhile."""
LATE = 86_400.0
"""Seconds for which data may be too old by the wall clock alone until operators are told. Restarts take less."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """What one shard removed of a subject so far."""

    shard: str
    subject: str
    """A keyed hash of the subject. All shards of a pool have the same. `age` for what was too old."""
    asked_at: float
    """When it was first asked for, in seconds of the wall clock."""
    is_done: bool
    """False: the shard goes on by itself, also after a restart."""
    removed: Mapping[str, Any] = field(default_factory=dict)
    """In plain values. `trajectories`: by keyed hash of their uid, where each was, its steps and tokens, and a hash of
    its token ids. `files`: by name, the rows removed and the SHA-256 before and after. Counts of `late_rewards`,
    `audit_entries` and `quarantined`. `set_aside`: damaged journals that were deleted. `gateways` and
    `silent_gateways`: whose spools were cleaned, and who did not answer. `versions`: trained on it."""
    names: Sequence[str] = ()
    """Keyed hashes of the names of its trajectories and sessions, for the other shards."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """What a shard keeps though it is too old by the wall clock: the pool has not run for as long since it came. The
    pool was off, or the clock is wrong."""

    shard: str = ""
    clock: float = 0.0
    """The shard's wall clock, in seconds."""
    trajectories: int = 0
    """In the pool."""
    archived: int = 0
    """In the archive."""
    since: float = inf
    """When the oldest of them began, in seconds of the wall clock."""

    @property
    def count(self) -> int:
        return self.trajectories + self.archived


def _slice_of(shard: "Shard") -> Any:
    """The `Forgetting` of the shard. A client does not load its module, which reads archives."""
    return next(part for part in shard.pool.state.slices if part.name == FORGETTING)


class _RemovesData(LongOperation[ShardReceipt]):
    """A shard that does not answer, or is not done, goes on by itself. Asked again, it has the receipt."""

    __slots__ = ()

    def again(self, parts: Sequence[ShardReceipt]) -> Self | None:
        if waiting := [receipt.shard for receipt in parts if not receipt.is_done]:
            raise PoolUnavailable(f"{', '.join(waiting)} will go on with it; ask again for the receipt")
        return None


@message
@dataclass(frozen=True, slots=True)
class Forget(_RemovesData):
    """Remove everything of a subject, for good."""

    subject: str
    also: Sequence[str] = ()
    """Hashes of names that other shards found: a late reward may be at another shard than its trajectory."""

    async def run(self, shard: "Shard") -> ShardReceipt:
        receipt: ShardReceipt = await _slice_of(shard).forget(self.subject, self.also)
        return receipt

    def again(self, parts: Sequence[ShardReceipt]) -> Self | None:
        found = {name for receipt in parts for name in receipt.names}
        if not all(found <= set(receipt.names) for receipt in parts):
            return replace(self, also=sorted(found))
        return _RemovesData.again(self, parts)


@message
@dataclass(frozen=True, slots=True)
class ForgetOverdue(_RemovesData):
    """Remove everything that is older than so many seconds by the wall clock, and what is older than its own retention.
    Each run has a receipt of its own."""

    seconds: float

    async def run(self, shard: "Shard") -> ShardReceipt:
        receipt: ShardReceipt = await _slice_of(shard).forget_overdue(self.seconds, by_clock=True)
        return receipt


@message
@dataclass(frozen=True, slots=True)
class FindOverdue(LongOperation[Overdue]):
    """What the retention keeps, though it is too old by the wall clock. What it need not keep is removed before."""

    async def run(self, shard: "Shard") -> Overdue:
        overdue: Overdue = await _slice_of(shard).enforce_retention()
        return overdue


@message
@dataclass(frozen=True, slots=True)
class ForgetKeptBack(_RemovesData):
    """Remove that too: a person says that the wall clock is right, and that the pool was off."""

    async def run(self, shard: "Shard") -> ShardReceipt:
        receipt: ShardReceipt = await _slice_of(shard).forget_kept_back()
        return receipt


def merge_receipts(receipts: Sequence[ShardReceipt], written_at: float) -> dict[str, Any]:
    """The receipt of a pool, in plain values. `written_at` is in seconds of the wall clock."""
    versions = {version for receipt in receipts for version in receipt.removed.get("versions", ())}
    return {
        "subject": receipts[0].subject,
        "older_than": receipts[0].removed.get(OLDER_THAN),
        "asked_at": min(receipt.asked_at for receipt in receipts),
        "written_at": written_at,
        "trained_versions": sorted(versions),
        "shards": {receipt.shard: dict(receipt.removed) for receipt in receipts},
    }


class Scope:
    """Which data a tombstone removes."""

    def __init__(self, tombstone: Tombstone, tombstones: Tombstones) -> None:
        self.tombstone = tombstone
        self.is_of_age = tombstone.is_of_age
        self._tombstones = tombstones

    @property
    def has_removed(self) -> bool:
        return any(found for what, found in self.tombstone.removed.items() if what in REMOVED or what.endswith(ENTRIES))

    def due_at(self, born: float, metadata: JsonObject) -> float:
        """When data that was born then is too old, by the wall clock; infinite if never."""
        older_than, own = self.tombstone.removed.get(OLDER_THAN), metadata.get(RETENTION)
        seconds = inf if older_than is None else older_than
        if isinstance(own, int | float) and not isinstance(own, bool):
            seconds = min(own, seconds)
        return born + float(seconds)

    def is_due(self, born: float, metadata: JsonObject, arrived: float | None = None) -> bool:
        """Is it for what is too old, and is data too old that was born then, and came to the pool then?"""
        if not self.is_of_age:
            return False
        due = self.due_at(born, metadata)
        if due > self.tombstone.at or not self.tombstone.removed.get(RUNNING_TIME):
            return due <= self.tombstone.at
        return self._tombstones.running.since(arrived or born) >= due - born

    def is_named(self, trajectory_uid: str, prompt_uid: str = "") -> bool:
        """Is it a trajectory with this uid and prompt_uid that the tombstone has removed?"""
        if self.is_of_age:
            return self._tombstones.digest(trajectory_uid) in self.tombstone.removed.get("trajectories", ())
        return self._tombstones.has_name(trajectory_uid, prompt_uid)

    def covers(self, metadata: JsonObject, born: float, arrived: float | None) -> bool:
        """Is it data of the subject, or too old?"""
        if self.is_of_age:
            return self.is_due(born, metadata, arrived)
        return self._tombstones.is_of(self.tombstone.subject, metadata)

    def covers_record(self, trajectory_uid: str, prompt_uid: str, at: float) -> bool:
        """Is a late reward, or a person's decision, to be removed that is about this trajectory and of that time?"""
        return self.is_named(trajectory_uid, prompt_uid) or self.is_due(at, {})

    def add_listed(self, what: str, found: Collection[Any]) -> None:
        """Add to a list of the receipt what it lacks."""
        removed = self.tombstone.removed
        removed[what] = sorted({*removed.get(what, ()), *found})

    def count(self, what: str, count: int) -> None:
        """Add to a number of the receipt."""
        if count:
            self.tombstone.removed[what] = self.tombstone.removed.get(what, 0) + count


class RowTest(Scope):
    """Which rows of a file a tombstone removes."""

    def __init__(self, tombstone: Tombstone, tombstones: Tombstones) -> None:
        super().__init__(tombstone, tombstones)
        self.next_due = inf
        """When the first of the rows so far is too old."""
        self.kept_back: dict[str, float] = {}
        """When trajectories began that are too old by the wall clock alone."""

    def is_removed(self, row: "ArchivedRow") -> bool:
        is_named = self.is_named(row.trajectory_uid, row.prompt_uid)
        is_removed = is_named or self.covers(row.metadata, row.at, row.arrived)
        if self.is_of_age:
            due = self.due_at(row.at, row.metadata)
            self.next_due = min(self.next_due, due)
            if not is_removed and due + LATE < self.tombstone.at:
                self.kept_back[row.trajectory_uid] = min(row.at, self.kept_back.get(row.trajectory_uid, inf))
        return is_removed


class Removal(Scope):
    """The removal of what one tombstone covers from the state of a shard."""

    def __init__(self, tombstone: Tombstone, state: PoolState) -> None:
        super().__init__(tombstone, state.tombstones)
        self._state = state

    def covers_trajectory(self, trajectory: Trajectory) -> bool:
        return self.covers(trajectory.metadata, trajectory.born, trajectory.group.opened_at)

    def covered(self) -> list[Trajectory]:
        """All that the state has: held ones, and the history."""
        return [found for found in self._trajectories() if self.covers_trajectory(found)]

    def kept_back(self, late: float = LATE) -> list[Trajectory]:
        """All that the state has and that is too old by the wall clock alone, by more than so many seconds."""
        at = self.tombstone.at
        return [found for found in self._trajectories() if self.due_at(found.born, found.metadata) + late < at]

    def save(self) -> None:
        self._state.save_tombstone(self.tombstone)

    def remove_held(self) -> Iterator[None]:
        """Remove what the state has of it: trajectories in queues, under lease and in the history, quarantined steps,
        sessions, closed names. Each `next` removes some; the state may change between two of them."""
        state, nbytes = self._state, 0
        for trajectory in self.covered():
            if nbytes > PIECE_BYTES:
                self.save()
                yield
                nbytes = 0
            nbytes += trajectory.nbytes
            if state.holds(trajectory):
                self.note(trajectory, QUEUE if trajectory.group.lease is None else LEASE)
                state.remove_trajectory(trajectory, EXPIRED if self.is_of_age else SubmitVerdict.DELETED.value)
            elif state.history.get(trajectory.uid) is trajectory:
                self.note(trajectory, HISTORY)
                state.remove_from_history(trajectory)
        self._remove_sessions()
        self._remove_closed()
        self.count("quarantined", state.remove_quarantined(self._covers_quarantined))
        self.save()
        yield

    def remove_from_slices(self) -> None:
        """Remove what slices have about such trajectories, or of such a time."""
        for part in self._state.slices:
            self.count(part.name + ENTRIES, part.remove(self.covers_record))
        self.save()

    def note(self, trajectory: Trajectory, where: str) -> None:
        """Put it into the receipt and, if it is of a subject, take no later step of it."""
        digest = self._tombstones.digest(trajectory.uid)
        listed = self.tombstone.removed.setdefault("trajectories", {})
        if digest not in listed:
            self.tombstone.removed.setdefault("lineage", []).append(lineage_name(trajectory.uid))
        listed[digest] = {
            "where": where,
            "steps": len(trajectory.steps),
            "tokens": sum(step.tokens for step in trajectory.steps.values()),
            "content": self._content_digest(trajectory),
        }
        self.refuse(names_of(trajectory.uid, trajectory.group.prompt_uid))

    def refuse(self, names: Collection[str]) -> None:
        """Nothing of them is taken any more, if it is for a subject."""
        if not self.is_of_age:
            self._state.refuse_names(map(self._tombstones.digest, names))

    def _trajectories(self) -> tuple[Trajectory, ...]:
        return (*self._state.trajectories.values(), *self._state.history.values())

    def _remove_sessions(self) -> None:
        subject = self.tombstone.subject
        if self.is_of_age:
            self._state.remove_sessions(lambda _, uid: self.is_named(uid))
            return
        digest = self._tombstones.digest
        sessions = self._state.remove_sessions(lambda user, _: bool(user) and digest(user) == subject)
        closed = [uid for uid, of_subject in self._state.closed_subjects.items() if of_subject == subject]
        self.refuse([*map(session_prompt_uid, sessions), *closed])

    def _remove_closed(self) -> None:
        """What is left of trajectories that are gone, by their names."""
        known = {*self._state.closed, *self._state.change_log.gone}
        self._state.remove_closed(
            self.tombstone.subject, {uid for uid in known if self.is_named(uid) or self._is_gone(uid)}
        )

    def _is_gone(self, uid: str) -> bool:
        """Has the trajectory left the pool so long ago that it is too old?"""
        last = self._state.change_log.last_snapshot(uid) if self.is_of_age else None
        return last is not None and uid not in self._state.history and self.is_due(last.changed_at, {})

    def _covers_quarantined(self, step: Step) -> bool:
        is_named = self.is_named(step.trajectory_uid, step.prompt_uid)
        return is_named or (step.started_at > 0 and self.is_due(step.started_at, step.metadata))

    def _content_digest(self, trajectory: Trajectory) -> str:
        """A hash of the token ids of its steps, in order, under the pool's key."""
        content = blake2b(key=self._tombstones.key, digest_size=DIGEST_SIZE)
        for _, step in trajectory.in_order():
            if step.quarantine is None:
                content.update(trajectory.tokens.read(step.branch, step.tokens).tobytes())
        return content.hexdigest()


def note_overdue(state: PoolState, seconds: float | None, at: float, *, by_clock: bool) -> Tombstone:
    """What is older than that now, or than its own retention, is to be removed: `by_clock` by the wall clock alone,
    because a person says so. Of a run that is done, nothing is kept. One that is not done is extended; but one that a
    person asked for only by another such."""
    tombstone, running_time = state.tombstones.subjects.get(AGE), {} if by_clock else {RUNNING_TIME: True}
    if tombstone is None or tombstone.is_done:
        tombstone = Tombstone(AGE, at, removed={OLDER_THAN: seconds, **running_time})
    elif tombstone.removed.get(RUNNING_TIME, False) is not by_clock:
        given = [one for one in (seconds, tombstone.removed[OLDER_THAN]) if one is not None]
        tombstone.at, tombstone.removed[OLDER_THAN] = at, min(given, default=None)
    elif by_clock:
        del tombstone.removed[RUNNING_TIME]
        tombstone.at, tombstone.removed[OLDER_THAN] = at, seconds
    state.save_tombstone(tombstone)
    return tombstone
