"""Recovery of a shard: its journal is read into an empty pool.

Damage costs only what cannot be read. The rest goes into a new journal, and the damaged file is set aside.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.pool.api.curation import AuditEntry, CurationAction, CurationOutcome
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.journal import (
    CARRIED_NAMES,
    FILTER_FIELDS,
    GROUP_FIELDS,
    OWN_NAMES,
    STEP_FIELDS,
    TRAJECTORY_FIELDS,
    JournalDamaged,
    ShardJournal,
    checksum,
    load_json,
)
from stepwell.pool.shard.late_rewards import LateReward
from stepwell.pool.shard.lineage import LineageRow
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.pool.state.tombstones import Tombstone
from stepwell.steps.prefix_tree import Placement, PrefixTree
from stepwell.steps.schema import STEP_COLUMNS
from stepwell.steps.step import Exactness, VersionSpan
from stepwell.steps.step_filter import StepFilter

log = logging.getLogger("stepwell.pool")

STEP_DEFAULTS: dict[str, Any] = {column.name: column.default for column in STEP_COLUMNS}
"""The values of columns that the journal of an older version lacks."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What the journal had."""

    groups: int
    trajectories: int
    steps: int
    torn_frames: int
    damaged: bool
    """Something could not be read. The rest was written to a new journal."""


def restore_pool(pool: Pool, journal: ShardJournal) -> RecoveryReport:
    """Fill an empty pool from its journal."""
    reader = JournalReader(journal)
    snapshot = reader.snapshot()
    if snapshot is not None:
        pool.state.recall(snapshot)
    groups = {group.seq: group for group in reader.groups()}
    trajectories = {trajectory.number: trajectory for trajectory in reader.trajectories(groups)}
    for trajectory in reader.read_steps(trajectories):
        del trajectories[trajectory.number], trajectory.group.trajectories[trajectory.uid]
        log.error("trajectory %s could not be read back from the journal and is lost", trajectory.uid)
    leases = {lease.uid: lease for lease in reader.leases()}
    closed, ended, audit = list(reader.closed()), list(reader.ended()), list(reader.audit())
    decisions, acknowledged = list(reader.decisions()), list(reader.acknowledged())
    tombstones = list(reader.tombstones())
    placements: dict[int, Placement] = {}
    if reader.damaged:
        groups = {seq: group for seq, group in groups.items() if group.trajectories}
        for trajectory in trajectories.values():
            placements |= _rebuild_tree(trajectory)
    records = list(groups.values())
    subjects = [tombstone for tombstone in tombstones if isinstance(tombstone, Tombstone)]
    pool.state.load_tombstones(subjects, [name for name in tombstones if isinstance(name, str)])
    pool.state.load(
        records,
        leases,
        closed=closed,
        ended=ended,
        acknowledged=acknowledged,
        audit=audit,
        decisions=decisions,
        damaged=reader.damaged,
    )
    if reader.damaged:
        late_rewards = list(reader.late_rewards())
        journal.restore_lineage(list(reader.lineage()))
        pool_time = reader.pool_time()
        _write_again(pool, journal, groups.values(), leases.values(), placements, late_rewards, audit, pool_time)
    return RecoveryReport(
        groups=len(groups),
        trajectories=len(trajectories),
        steps=sum(len(trajectory.steps) for trajectory in trajectories.values()),
        torn_frames=journal.store.torn_frames,
        damaged=reader.damaged,
    )


def _rebuild_tree(trajectory: Trajectory) -> dict[int, Placement]:
    """A prefix tree of the steps that were read. Returns each step's placement in it, by the step's number."""
    old, trajectory.tokens = trajectory.tokens, PrefixTree()
    placements: dict[int, Placement] = {}
    for step in sorted(trajectory.steps.values(), key=lambda step: step.number):
        if step.quarantine is None:
            placement = placements[step.number] = trajectory.tokens.place(old.read(step.branch, step.tokens))
            step.branch = placement.branch
    return placements


def _write_again(
    pool: Pool,
    journal: ShardJournal,
    groups: Iterable[Group],
    leases: Iterable[Lease],
    placements: Mapping[int, Placement],
    late_rewards: Iterable[LateReward],
    audit: Iterable[AuditEntry],
    pool_time: float | None,
) -> None:
    """Write everything that could be read to a new journal."""
    for group in groups:
        journal.save_group(group)
        for trajectory in group.trajectories.values():
            journal.save_trajectory(trajectory)
            for step in trajectory.steps.values():
                journal.add_step(trajectory, step, placements.get(step.number))
    for lease in leases:
        journal.save_lease(lease)
    _write_what_is_gone(pool, journal)
    for late in late_rewards:
        journal.add_late_reward(late)
    for entry in audit:
        journal.add_audit(entry)
    journal.save_decisions(pool.state.decisions)
    aside = journal.rewrite(pool.state.snapshot(), pool_time)
    log.error("journal %s is damaged; what could be read is kept, the old one is %s", journal.store.name, aside)


def _write_what_is_gone(pool: Pool, journal: ShardJournal) -> None:
    """What is remembered of trajectories, subjects and leases."""
    for uid, revision in pool.state.closed.items():
        journal.add_closed(uid, revision, pool.state.closed_subjects.get(uid, ""))
    for tombstone in pool.state.tombstones.subjects.values():
        journal.save_tombstone(tombstone)
    journal.add_forgotten_names(sorted(pool.state.tombstones.names))
    for uid, how in pool.state.ended_leases.items():
        journal.add_ended(uid, how)
    for uid in pool.state.acknowledged:
        journal.save_acknowledged(uid)


class JournalReader:
    """Reads all rows that can be read."""

    def __init__(self, journal: ShardJournal) -> None:
        self.damaged = False
        """True if something could not be read."""
        self._store = journal.store
        self._pool_time = journal.pool_time
        self._step_counts: dict[int, int] = {}
        """Steps of each trajectory when it was last saved. For a complete trajectory, these are nearly always all."""

    def snapshot(self) -> Any:
        for (value,) in self._rows("SELECT value FROM meta WHERE key = 'snapshot'"):
            return self._parsed(value)
        return None

    def pool_time(self) -> float | None:
        try:
            return self._pool_time()
        except (JournalDamaged, ValueError):
            return self._store.written_at

    def groups(self) -> Iterator[Group]:
        for seq, info in self._rows("SELECT seq, info FROM groups ORDER BY seq"):
            if (fields := self._named(GROUP_FIELDS, info, new=2)) is not None:
                yield Group(seq, **fields)

    def trajectories(self, groups: Mapping[int, Group]) -> Iterator[Trajectory]:
        for number, seq, info in self._rows("SELECT number, group_seq, info FROM trajectories ORDER BY number"):
            fields = self._named(TRAJECTORY_FIELDS, info, new=4)
            if seq not in groups or fields is None:
                self.damaged = True
                continue
            self._step_counts[number] = fields.pop("step_count")
            fields.pop("reward_left_out", None)
            fields.setdefault("completed_time", fields.get("completed_at", 0.0))
            trajectory = Trajectory(group=groups[seq], number=number, **fields)
            trajectory.group.trajectories[trajectory.uid] = trajectory
            yield trajectory

    def read_steps(self, trajectories: Mapping[int, Trajectory]) -> list[Trajectory]:
        """Put the steps into their trajectories. Returns those that lack steps, or may lack some after damage."""
        incomplete: dict[int, Trajectory] = {}
        for row in self._rows("SELECT * FROM steps ORDER BY number"):
            trajectory = trajectories.get(row[1])
            if trajectory is None:
                self.damaged = True
            elif not _read_step(trajectory, row):
                self.damaged = True
                incomplete[trajectory.number] = trajectory
        if self.damaged:
            incomplete |= {number: t for number, t in trajectories.items() if not self._is_surely_complete(t)}
        return list(incomplete.values())

    def _is_surely_complete(self, trajectory: Trajectory) -> bool:
        return trajectory.completed and 0 < self._step_counts[trajectory.number] <= len(trajectory.steps)

    def leases(self) -> Iterator[Lease]:
        for uid, channel, expires_at, step_filter in self._rows("SELECT uid, channel, expires_at, gate FROM leases"):
            fields = self._named(FILTER_FIELDS, step_filter, new=1)
            if fields is not None:
                grade, models = Exactness(fields["min_exactness"]), tuple(fields.get("models", ()))
                yield Lease(uid, channel, expires_at, StepFilter(grade, fields["untrainable"], models))

    def ended(self) -> Iterator[tuple[str, Settlement]]:
        for uid, how in self._rows("SELECT uid, how FROM ended ORDER BY n"):
            yield uid, Settlement(how)

    def acknowledged(self) -> Iterator[str]:
        for (uid,) in self._rows("SELECT uid FROM acknowledged"):
            yield uid

    def closed(self) -> Iterator[tuple[str, int, str]]:
        yield from self._rows("SELECT uid, revision, subject FROM closed ORDER BY n")

    def tombstones(self) -> Iterator[Tombstone | str]:
        """Of subjects, and the digests of names."""
        for digest, info in self._rows("SELECT digest, info FROM tombstones"):
            fields = None if info is None else self._parsed(info)
            yield Tombstone(**fields) if isinstance(fields, dict) else digest

    def late_rewards(self) -> Iterator[LateReward]:
        for (info,) in self._rows("SELECT info FROM late_rewards ORDER BY n"):
            if isinstance(fields := self._parsed(info), dict):
                yield LateReward(**fields)

    def lineage(self) -> Iterator[LineageRow]:
        for (info,) in self._rows("SELECT info FROM lineage ORDER BY n"):
            if isinstance(fields := self._parsed(info), dict):
                yield LineageRow(**fields)

    def audit(self) -> Iterator[AuditEntry]:
        for (info,) in self._rows("SELECT info FROM audit ORDER BY n"):
            if isinstance(fields := self._parsed(info), dict):
                known = {"action": CurationAction(fields["action"]), "outcome": CurationOutcome(fields["outcome"])}
                yield AuditEntry(**fields | known)

    def decisions(self) -> Iterator[PolicyDecision]:
        for (value,) in self._rows("SELECT value FROM meta WHERE key = 'decisions'"):
            for fields in self._parsed(value) or ():
                yield PolicyDecision(**fields)

    def _named(self, names: Sequence[str], info: bytes, *, new: int = 0) -> dict[str, Any] | None:
        """The values by name. An older file may lack the last `new` ones."""
        values = self._parsed(info)
        if not isinstance(values, list) or not len(names) - new <= len(values) <= len(names):
            self.damaged = True
            return None
        return dict(zip(names, values, strict=False))

    def _parsed(self, value: bytes) -> Any:
        """None if the value is not JSON. These rows have no checksum."""
        try:
            return load_json(value)
        except ValueError as failure:
            self.damaged = True
            log.error("a row of the journal cannot be read: %s", failure)
            return None

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._store.rows(query)
        except JournalDamaged as failure:
            self.damaged = True
            log.error("the rest of a table of the journal cannot be read: %s (%s)", failure, query)


def _read_step(trajectory: Trajectory, row: tuple[Any, ...]) -> bool:
    """Restore one step. False if it is not what was written, or if the step that it extends is missing."""
    number, _, base, shared, info, reward, source, revision, lease, shipped, added, logprobs, mask, check = row
    if checksum(info, added, logprobs, mask) != check:
        return False
    fields = STEP_DEFAULTS | dict(zip(STEP_FIELDS, load_json(info), strict=False))
    fields["version_spans"] = tuple(VersionSpan(*span) for span in fields["version_spans"])
    step = StoredStep(
        **{name: fields[name] for name in OWN_NAMES} | {"exactness": Exactness(fields["exactness"])},
        carried=tuple(fields[name] for name in CARRIED_NAMES),
        number=number,
        logprobs=None if logprobs is None else np.frombuffer(logprobs, np.float32),
        mask=None if mask is None else np.frombuffer(mask, np.bool_),
        reward=reward,
        reward_source=source,
        reward_revision=revision,
        lease=lease,
        shipped=bool(shipped),
    )
    trajectory.steps[step.identity] = step
    if base is None:
        return True
    tree = trajectory.tokens
    if not tree.can_restore(base, shared):
        return False
    return tree.restore(base, shared, np.frombuffer(added, np.int32)) == step.branch
