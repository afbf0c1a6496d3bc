"""Recovery of a shard: its journal is read into an empty pool.

- Damage costs only what cannot be read: a row whose checksum holds is kept, whatever is around it. A trajectory that
  lacks a step is lost as a whole, and so are the trajectories of a lost group. The log names them, and their steps are
  counted as dropped, cause `corrupt`.
- The rest goes into a new journal, and the damaged one is set aside.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.rules.pool import Pool
from stepwell.pool.shard.archive_files import LateReward, LineageRow
from stepwell.pool.shard.journal import (
    CARRIED_NAMES,
    FILTER_FIELDS,
    GROUP_FIELDS,
    OWN_NAMES,
    STEP_FIELDS,
    TRAJECTORY_FIELDS,
    ShardJournal,
)
from stepwell.pool.shard.journal_store import JournalDamaged, checksum, load_json, unseal
from stepwell.pool.state.call_operations import reason_of
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.stored_step import StoredStep
from stepwell.pool.state.tombstones import Tombstone
from stepwell.steps.prefix_tree import Placement, PrefixTree
from stepwell.steps.step import Exactness, VersionSpan
from stepwell.steps.trainable import StepFilter

log = logging.getLogger("stepwell.pool")

STEP_ROW = (
    *("number", "trajectory", "base", "shared", "info", "reward", "reward_source", "reward_revision", "lease"),
    *("shipped", "added", "logprobs", "mask", "checksum", "state_checksum"),
)
STEPS_OF_TRAJECTORIES = "SELECT trajectory, count(*) FROM steps GROUP BY trajectory"


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
        lost = "trajectory %s could not be read back from the journal and is lost: it lacks steps, %d could be read"
        log.error(lost, trajectory.uid, len(trajectory.steps))
    leases = {lease.uid: lease for lease in reader.leases()}
    closed, ended, slice_rows = list(reader.closed()), list(reader.ended()), list(reader.slice_rows())
    decisions, acknowledged = list(reader.decisions()), list(reader.acknowledged())
    tombstones = list(reader.tombstones())
    late_rewards, lineage, archived = list(reader.late_rewards()), list(reader.lineage()), list(reader.archived())
    placements: dict[int, Placement] = {}
    if reader.damaged:
        groups = {seq: group for seq, group in groups.items() if group.trajectories}
        for trajectory in trajectories.values():
            placements |= _rebuild_tree(trajectory)
    records = list(groups.values())
    subjects = [tombstone for tombstone in tombstones if isinstance(tombstone, Tombstone)]
    pool.state.load_tombstones(subjects, [name for name in tombstones if isinstance(name, str)])
    pool.state.load_slices(slice_rows)
    pool.state.load(
        records,
        leases,
        closed=closed,
        ended=ended,
        acknowledged=acknowledged,
        decisions=decisions,
        damaged=reader.damaged,
    )
    if reader.damaged:
        journal.restore_lineage(lineage)
        for file in archived:
            journal.note_archived(file)
        for name, key, value in slice_rows:
            journal.save_row(name, key, value)
        pool_time = reader.pool_time()
        _write_again(pool, journal, groups.values(), leases.values(), placements, late_rewards, pool_time)
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
    journal.save_decisions(pool.state.decisions)
    aside = journal.rewrite(pool.state.snapshot(), pool_time)
    log.error("journal %s is damaged; what could be read is kept, the old one is %s", journal.store.name, aside)


def _write_what_is_gone(pool: Pool, journal: ShardJournal) -> None:
    """What is remembered of trajectories, subjects and leases."""
    for uid, revision in pool.state.closed.items():
        journal.add_closed(uid, revision, pool.state.closed_subjects.get(uid, ""))
    for tombstone in pool.state.tombstones.subjects.values():
        journal.save_tombstone(tombstone)
    journal.add_refused_names(sorted(pool.state.tombstones.names))
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
            return self._parsed(value, "snapshot")
        return None

    def pool_time(self) -> float | None:
        try:
            return self._pool_time()
        except (JournalDamaged, ValueError):
            return self._store.written_at

    def groups(self) -> Iterator[Group]:
        for seq, info in self._table("groups", "seq, info"):
            if (fields := self._named(GROUP_FIELDS, info, seq)) is not None:
                yield Group(seq, **fields)

    def trajectories(self, groups: Mapping[int, Group]) -> Iterator[Trajectory]:
        for number, seq, info in self._table("trajectories", "number, group_seq, info"):
            fields = self._named(TRAJECTORY_FIELDS, info, number, seq)
            if seq not in groups or fields is None:
                self.damaged = True
                log.error("trajectory %s is lost, or its group", fields["uid"] if fields else f"number {number}")
                continue
            self._step_counts[number] = fields.pop("step_count")
            fields["kept_rewards"] = tuple(map(tuple, fields["kept_rewards"]))
            fields["lost_calls"] = tuple(map(tuple, fields["lost_calls"]))
            fields["gateways"] = tuple(fields["gateways"])
            fields["marks"] = {uid: (name, own) for uid, (name, own) in fields["marks"].items()}
            trajectory = Trajectory(group=groups[seq], number=number, **fields)
            trajectory.group.trajectories[trajectory.uid] = trajectory
            yield trajectory

    def read_steps(self, trajectories: Mapping[int, Trajectory]) -> list[Trajectory]:
        """Put the steps into their trajectories. Returns those that lack steps."""
        expected, found = self._expected_steps(), Counter[int]()
        broken: dict[int, Trajectory] = {}
        is_other_damage, self.damaged = self.damaged, False
        for row in self._table("steps", ", ".join(STEP_ROW)):
            if not _is_intact(row):
                self.damaged = True
                log.error("step number %d of the journal is damaged", row[0])
                continue
            found[row[1]] += 1
            trajectory = trajectories.get(row[1])
            if trajectory is None:
                is_other_damage = True
            elif not _read_step(trajectory, row):
                broken[trajectory.number] = trajectory
        is_less = self.damaged if expected is None else found.total() < expected.total()
        self.damaged |= is_other_damage or bool(broken) or found != expected
        if is_less:
            broken |= {number: t for number, t in trajectories.items() if self._lacks_steps(t, expected)}
        return list(broken.values())

    def _expected_steps(self) -> Counter[int] | None:
        """How many steps each trajectory has, by another way than reading them; None if that is damaged."""
        try:
            return Counter(dict(self._store.rows(STEPS_OF_TRAJECTORIES)))
        except JournalDamaged:
            return None

    def _lacks_steps(self, trajectory: Trajectory, expected: Counter[int] | None) -> bool:
        if expected is not None:
            return len(trajectory.steps) < expected[trajectory.number]
        return not self._is_surely_complete(trajectory)

    def _is_surely_complete(self, trajectory: Trajectory) -> bool:
        return trajectory.completed and 0 < self._step_counts[trajectory.number] <= len(trajectory.steps)

    def leases(self) -> Iterator[Lease]:
        for uid, channel, expires_at, step_filter in self._table("leases", "uid, channel, expires_at, gate"):
            fields = self._named(FILTER_FIELDS, step_filter, uid, channel, expires_at)
            if fields is not None:
                grade, models = Exactness(fields["min_exactness"]), tuple(fields["models"])
                yield Lease(uid, channel, expires_at, StepFilter(grade, fields["untrainable"], models))

    def ended(self) -> Iterator[tuple[str, Settlement]]:
        for _, uid, how in self._table("ended", "n, uid, how"):
            if how in tuple(Settlement) and isinstance(uid, str):
                yield uid, Settlement(how)
            else:
                self.damaged = True

    def acknowledged(self) -> Iterator[str]:
        for (uid,) in self._table("acknowledged", "uid"):
            yield uid

    def closed(self) -> Iterator[tuple[str, int, str]]:
        for _, uid, revision, subject in self._table("closed", "n, uid, revision, subject"):
            if isinstance(uid, str) and isinstance(revision, int) and isinstance(subject, str):
                yield uid, revision, subject
            else:
                self.damaged = True

    def tombstones(self) -> Iterator[Tombstone | str]:
        """Of subjects, and the digests of names."""
        for digest, info in self._table("tombstones", "digest, info"):
            fields = None if info is None else self._parsed(info, digest)
            yield Tombstone(**fields) if isinstance(fields, dict) else digest

    def late_rewards(self) -> Iterator[LateReward]:
        for _, info in self._table("late_rewards", "n, info"):
            if isinstance(fields := self._parsed(info), dict):
                yield LateReward(**fields)

    def lineage(self) -> Iterator[LineageRow]:
        for _, info in self._table("lineage", "n, info"):
            if isinstance(fields := self._parsed(info), dict):
                yield LineageRow(**fields)

    def archived(self) -> Iterator[str]:
        for (file,) in self._table("archived", "file"):
            yield file

    def slice_rows(self) -> Iterator[tuple[str, str, Any]]:
        """The name of the slice, the key and the value, the oldest first."""
        for _, name, key, info in self._table("slices", "n, slice, key, info"):
            if (value := self._parsed(info, name, key)) is not None:
                yield name, key, value

    def decisions(self) -> Iterator[PolicyDecision]:
        for (value,) in self._rows("SELECT value FROM meta WHERE key = 'decisions'"):
            for fields in self._parsed(value, "decisions") or ():
                yield PolicyDecision(**fields)

    def _named(self, names: Sequence[str], info: bytes, *keys: object) -> dict[str, Any] | None:
        """The values by name."""
        values = self._parsed(info, *keys)
        if not isinstance(values, list) or len(values) != len(names):
            self.damaged = True
            return None
        return dict(zip(names, values, strict=True))

    def _parsed(self, value: bytes, *keys: object) -> Any:
        """None if the value, or another column of its row, is not what was written."""
        try:
            return unseal(value, *keys)
        except ValueError as failure:
            self.damaged = True
            log.error("a row of the journal cannot be read: %s", failure)
            return None

    def _table(self, name: str, columns: str) -> Iterator[tuple[Any, ...]]:
        """Its rows in the order of the first column, without those that cannot be read."""
        for row in self._store.table(name, columns):
            if row is not None:
                yield row
                continue
            self.damaged = True
            log.error("some rows of the table %s of the journal cannot be read", name)

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._store.rows(query)
        except JournalDamaged as failure:
            self.damaged = True
            log.error("the rest of a table of the journal cannot be read: %s (%s)", failure, query)


def _is_intact(row: tuple[Any, ...]) -> bool:
    """Are its checksums right?"""
    *keys, info, reward, source, revision, lease, shipped, added, logprobs, mask, check, state_check = row
    state, values = (reward, source, revision, lease, bool(shipped)), (info, added, logprobs, mask)
    try:
        expected = checksum(*values, keys=tuple(keys)), checksum(keys=(row[0], *state))
    except TypeError:  # a number in place of bytes
        return False
    return (check, state_check) == expected


def _read_step(trajectory: Trajectory, row: tuple[Any, ...]) -> bool:
    """Restore one step. False if the step that it extends is missing."""
    number, _, base, shared, info, reward, source, revision, lease, shipped, added, logprobs, mask, *_ = row
    fields = dict(zip(STEP_FIELDS, load_json(info), strict=True))
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
    if (mark := trajectory.marks.get(step.uid)) is not None:
        step.untrainable = reason_of(mark)
    trajectory.steps[step.identity] = step
    if base is None:
        return True
    tree = trajectory.tokens
    if not tree.can_restore(base, shared):
        return False
    return tree.restore(base, shared, np.frombuffer(added, np.int32)) == step.branch
