"""What people decide about single trajectories: marks, rewards, and what must not be trained.

- A rejected trajectory is in no later batch. A reward that a person gave is in every later batch. Data that a trainer
  already has cannot be taken back.
- Every decision is in the audit trail: who, when, the value before, the outcome.
- The same decision again changes nothing.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from stepwell.common.message_format import message, sent
from stepwell.errors import BadRequest
from stepwell.pool.api.producing import RewardGiven
from stepwell.pool.api.watching import BY_A_PERSON, MARKS
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.pool_state import REJECTED, PoolState
from stepwell.pool.state.records import Trajectory, marks_of
from stepwell.pool.state.slice import Slice

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

AUDIT_KEPT = 10_000
"""How many audit entries are held in memory. A journal keeps all."""
MOST_MARKS = 20
BY_LENGTH, WHY_LENGTH, MARK_LENGTH = 80, 500, 40

Decision = tuple["CurationOutcome", str, str]
"""The outcome, and the values before and after in words."""


@sent
class CurationAction(StrEnum):
    MARK = "mark"
    UNMARK = "unmark"
    REJECT = "reject"
    RELABEL = "relabel"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """A person's decision about one trajectory."""

    action: CurationAction
    trajectory_uid: str
    prompt_uid: str
    by: str
    """The person's name."""
    why: str = ""
    mark: str = ""
    """For mark and unmark."""
    reward: float | None = None
    """For relabel."""


@sent
class CurationOutcome(StrEnum):
    """What a decision did."""

    DONE = "done"
    UNCHANGED = "unchanged"
    """The trajectory already was as decided."""
    LATE = "late"
    """The trajectory is already trained or dropped; training cannot be undone. An archive keeps a relabelled reward."""
    UNKNOWN = "unknown"


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """The record of one decision. Entries are never changed."""

    at: float
    """Wall-clock seconds."""
    by: str
    action: CurationAction
    trajectory_uid: str
    prompt_uid: str
    outcome: CurationOutcome
    before: str = ""
    """The reward, marks or state before the decision, in words."""
    after: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class AuditPage:
    entries: Sequence[AuditEntry]
    """Newest first."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer. Decisions about their trajectories are not among the entries."""


class AuditTrail(Slice):
    """The decisions so far, each under its number."""

    name = "audit"

    def __init__(self, journal: StateJournal) -> None:
        super().__init__(journal)
        self.entries: OrderedDict[str, AuditEntry] = OrderedDict()
        """The last ones, the oldest first."""
        self._last = 0

    def add(self, entry: AuditEntry) -> None:
        self._keep(str(self._last + 1), entry)
        self._save(str(self._last), entry)

    def newest(self, trajectory_uid: str | None = None) -> Iterator[AuditEntry]:
        """The newest first: all, or those about one trajectory."""
        entries = reversed(self.entries.values())
        return (entry for entry in entries if trajectory_uid in (None, entry.trajectory_uid))

    def dump(self) -> Mapping[str, Any]:
        return {key: asdict(entry) for key, entry in self.entries.items()}

    def load(self, rows: Mapping[str, Any]) -> None:
        for key, fields in rows.items():
            self._keep(key, _read_entry(fields))

    def explain(self, trajectory: Trajectory) -> str:
        if trajectory.rejected is None:
            return ""
        return f"It was rejected {trajectory.rejected}. If it comes back, it is dropped."

    def remove(self, is_wanted: Callable[[str, str, float], bool]) -> int:
        saved = [(key, _read_entry(fields)) for key, fields in self._journal.rows_of(self.name)]
        found = {
            key: entry
            for key, entry in chain(saved, self.entries.items())
            if is_wanted(entry.trajectory_uid, entry.prompt_uid, entry.at)
        }
        for key in found:
            self.entries.pop(key, None)
            self._remove(key)
        return len(found)

    def _keep(self, key: str, entry: AuditEntry) -> None:
        self._last = int(key)
        self.entries[key] = entry
        if len(self.entries) > AUDIT_KEPT:
            self.entries.popitem(last=False)


def _read_entry(fields: Mapping[str, Any]) -> AuditEntry:
    known = {"action": CurationAction(fields["action"]), "outcome": CurationOutcome(fields["outcome"])}
    return AuditEntry(**{**fields, **known})


@message
@dataclass(frozen=True, slots=True)
class Curate(Operation[CurationOutcome]):
    curation: Curation
    route = ShardRoute.GROUP

    @property
    def routed_by(self) -> str:
        return self.curation.prompt_uid

    def is_elsewhere(self, shard: "Shard") -> bool:
        return shard.pool.ownership.is_elsewhere(self.curation.trajectory_uid, self.curation.prompt_uid)

    def run(self, shard: "Shard") -> CurationOutcome:
        curator, curation = Curator(shard.pool.state), self.curation
        repeated = curator.repeats(curation)
        outcome = curator.curate(curation)
        if outcome is CurationOutcome.LATE and curation.action is CurationAction.RELABEL and not repeated:
            shard.keep_late(reward_of_relabel(curation))
        return outcome


@message
@dataclass(frozen=True, slots=True)
class ReadAudit(MergedOperation[list[AuditEntry], AuditPage]):
    """The last decisions, newest first."""

    limit: int
    trajectory_uid: str | None = None
    changes = False
    over_network = True

    def run(self, shard: "Shard") -> list[AuditEntry]:
        return Curator(shard.pool.state).audit(self.limit, self.trajectory_uid)

    def merge(self, parts: Mapping[str, list[AuditEntry]], missing: tuple[str, ...]) -> AuditPage:
        entries = (entry for part in parts.values() for entry in part)
        return AuditPage(sorted(entries, key=attrgetter("at"), reverse=True)[: self.limit], missing)


def reward_of_relabel(relabel: Curation) -> RewardGiven:
    """The reward in a person's relabel of a trajectory that is gone."""
    assert relabel.reward is not None, "a relabel has a reward"
    return RewardGiven(
        trajectory_uid=relabel.trajectory_uid,
        prompt_uid=relabel.prompt_uid,
        value=relabel.reward,
        source=BY_A_PERSON + relabel.by,
        notes=relabel.why,
    )


class Curator:
    """Does what people decide to the state of one shard."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._trail = state.slice_of(AuditTrail)

    def curate(self, curation: Curation) -> CurationOutcome:
        _check(curation)
        if self._state.tombstones.has_name(curation.trajectory_uid, curation.prompt_uid):
            return CurationOutcome.UNKNOWN
        outcome, before, after = self._decide(curation)
        entry = AuditEntry(
            at=self._state.now,
            by=curation.by,
            action=curation.action,
            trajectory_uid=curation.trajectory_uid,
            prompt_uid=curation.prompt_uid,
            outcome=outcome,
            before=before,
            after=after,
            why=curation.why,
        )
        self._trail.add(entry)
        return outcome

    def audit(self, limit: int, trajectory_uid: str | None = None) -> list[AuditEntry]:
        """The last decisions, newest first."""
        return [entry for entry, _ in zip(self._trail.newest(trajectory_uid), range(limit), strict=False)]

    def repeats(self, curation: Curation) -> bool:
        """Did this person give the same reward last?"""
        entries = self._trail.newest(curation.trajectory_uid)
        last = next((entry for entry in entries if entry.action is CurationAction.RELABEL), None)
        return last is not None and (last.by, last.after) == (curation.by, _words(curation.reward))

    def _decide(self, curation: Curation) -> Decision:
        uid = curation.trajectory_uid
        trajectory = self._state.trajectories.get(uid) or self._state.history.get(uid)
        if trajectory is None:
            return self._decide_late(curation) if uid in self._state.closed else (CurationOutcome.UNKNOWN, "", "")
        if trajectory.group.prompt_uid != curation.prompt_uid:
            return CurationOutcome.UNKNOWN, "", ""
        actions: dict[CurationAction, Callable[[Trajectory, Curation], Decision]] = {
            CurationAction.MARK: self._mark,
            CurationAction.UNMARK: self._mark,
            CurationAction.REJECT: self._reject,
            CurationAction.RELABEL: self._relabel,
        }
        return actions[curation.action](trajectory, curation)

    def _decide_late(self, curation: Curation) -> Decision:
        """The trajectory is gone. If it was rejected before, a rejection finds it as it should be."""
        last = self._state.last_snapshot(curation.trajectory_uid)
        before = "" if last is None else f"{last.state}: {last.cause}" if last.cause else last.state.value
        if curation.action is CurationAction.REJECT:
            is_rejected = last is not None and last.cause == REJECTED
            was_rejected = is_rejected or any(
                entry.action is CurationAction.REJECT and entry.outcome is CurationOutcome.DONE
                for entry in self._trail.newest(curation.trajectory_uid)
            )
            return (CurationOutcome.UNCHANGED if was_rejected else CurationOutcome.LATE), before, before
        after = _words(curation.reward) if curation.action is CurationAction.RELABEL else ""
        return CurationOutcome.LATE, before, after

    def _mark(self, trajectory: Trajectory, curation: Curation) -> Decision:
        before = marks_of(trajectory)
        after = tuple(mark for mark in before if mark != curation.mark)
        if curation.action is CurationAction.MARK:
            after = before if curation.mark in before else (*before, curation.mark)
        if len(after) > MOST_MARKS:
            raise BadRequest(f"trajectory {trajectory.uid} has {MOST_MARKS} marks already; take one away first")
        if after != before:
            self._state.update_metadata(trajectory, {**trajectory.metadata, MARKS: list(after)})
        outcome = CurationOutcome.UNCHANGED if after == before else CurationOutcome.DONE
        return outcome, ", ".join(before), ", ".join(after)

    def _reject(self, trajectory: Trajectory, curation: Curation) -> Decision:
        """At once, or, while a trainer has it, when it returns. If it does not return, it was trained once."""
        note = f"by {curation.by}" + (f": {curation.why}" if curation.why else "")
        if trajectory.group.trained:
            self._state.remove_from_history(trajectory, f"rejected {note}")
            return CurationOutcome.DONE, "trained, in the history", "out of the history"
        if trajectory.group.lease is None:
            before = "complete" if trajectory.completed else "open"
            self._state.drop_trajectory(trajectory, REJECTED, note, frees_place=False)
            return CurationOutcome.DONE, before, f"dropped: {REJECTED}"
        if trajectory.rejected is not None:
            return CurationOutcome.UNCHANGED, "under lease", "dropped if it comes back"
        self._state.reject_when_returned(trajectory, note)
        return CurationOutcome.DONE, "under lease", "dropped if it comes back"

    def _relabel(self, trajectory: Trajectory, curation: Curation) -> Decision:
        value, source = curation.reward, BY_A_PERSON + curation.by
        assert value is not None, "checked before"
        before = _words(trajectory.total_return(), trajectory.reward_source)
        if trajectory.reward == value and trajectory.reward_source == source:
            return CurationOutcome.UNCHANGED, before, _words(value)
        self._state.relabel(trajectory, value, source, curation.why)
        return CurationOutcome.DONE, before, _words(value)


def _check(curation: Curation) -> None:
    if not 1 <= len(curation.by) <= BY_LENGTH:
        raise BadRequest(f"a decision names its author, in 1 to {BY_LENGTH} characters")
    if len(curation.why) > WHY_LENGTH:
        raise BadRequest(f"the reason has {len(curation.why)} characters; {WHY_LENGTH} is the most")
    if curation.action in (CurationAction.MARK, CurationAction.UNMARK) and not 1 <= len(curation.mark) <= MARK_LENGTH:
        raise BadRequest(f"a mark has 1 to {MARK_LENGTH} characters")
    if curation.action is CurationAction.RELABEL and (curation.reward is None or not math.isfinite(curation.reward)):
        raise BadRequest(f"a reward is a finite number, not {curation.reward}")


def _words(reward: float | None, source: str = "") -> str:
    if reward is None:
        return "no reward"
    return f"{reward} by {source}" if source else str(reward)
