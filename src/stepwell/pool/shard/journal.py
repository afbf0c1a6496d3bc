"""The journal of one shard: rows that mirror the state of the shard, in a store.

- Changes are collected and written by `commit`, in one transaction. A call is answered after the commit of its changes,
  so what was acknowledged survives a kill -9; the rest may be sent again.
- A row exists as long as the object that it mirrors. The size of the store follows the size of the state.
- Nothing but `commit`, `commit_rows` and `rewrite` writes, so only they fail when the disk does.
- The statements are SQL that SQLite and PostgreSQL both understand, with `?` for a value.
- A row has a checksum of itself, keys included: a damaged row is noticed, and costs no other row.
- There is one commit for all calls that are under way at the same time: one that waits for the disk stays cheap.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.api.policy import PolicyDecision
from stepwell.pool.shard.archive_files import LateReward, LineageRow, lineage_of
from stepwell.pool.shard.journal_store import PUT_META, JournalStore, Statement, checksum, dump_json, seal, unseal
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.state_base import ENDED_KEPT
from stepwell.pool.state.stored_step import StoredStep
from stepwell.pool.state.tombstones import Tombstone
from stepwell.steps.prefix_tree import Placement
from stepwell.steps.step import CARRIED
from stepwell.steps.trainable import StepFilter

log = logging.getLogger("stepwell.pool")

MIB = 2**20
GROUP_FIELDS = (
    *("age", "prompt_uid", "channel", "size", "opened_at", "deadline", "attempts", "lease", "trained"),
    *("source", "given_up"),
)
TRAJECTORY_FIELDS = (
    *("uid", "metadata", "completed", "reward", "reward_source", "reward_revision", "step_count"),
    *("rejected", "completed_at", "completed_time", "kept_rewards", "late_rewards", "marks", "gateways", "lost_calls"),
)
OWN_NAMES = (
    *("identity", "uid", "step_index", "prompt_length", "response_length", "policy_version", "version_spans"),
    *("metadata", "exactness", "started_at", "quarantine", "branch", "nbytes", "untrainable", "model"),
)
CARRIED_NAMES = tuple(column.name for column in CARRIED)
STEP_FIELDS = (*OWN_NAMES, *CARRIED_NAMES)
own_values = attrgetter(*OWN_NAMES)
FILTER_FIELDS = ("min_exactness", "untrainable", "models")
PRUNE_INTERVAL = 1000
POOL_TIME_INTERVAL = 5.0
"""Seconds. A killed shard may count so many of them again."""

PUT_ROW = (
    "INSERT INTO slices (slice, key, info) VALUES (?, ?, ?) ON CONFLICT (slice, key) DO UPDATE SET info = excluded.info"
)
PUT_TOMBSTONE = "INSERT INTO tombstones VALUES (?, ?) ON CONFLICT (digest) DO UPDATE SET info = excluded.info"


class ShardJournal(StateJournal):
    """Changes are collected until `commit` writes them in one transaction."""

    def __init__(self, store: JournalStore, *, closed_kept: int) -> None:
        self.store = store
        self._closed_kept = closed_kept
        self.retired: list[Group] = []
        """Trained groups that are not archived yet. They still have their rows."""
        self.keeps_lineage = False
        """There is an archive that takes it."""
        self.lineage_added = 0
        """Rows since this process began."""
        self._groups: dict[int, Group | None] = {}
        """Changes since the last commit; None for a removed object. The next three are alike."""
        self._trajectories: dict[int, Trajectory | None] = {}
        self._added: dict[int, tuple[int, StoredStep, Placement | None]] = {}
        self._steps: dict[int, StoredStep | None] = {}
        self._other: list[Statement] = []
        """Changes to the other tables, in order."""
        self._pending = (self._groups, self._trajectories, self._added, self._steps, self._other)
        self._snapshot = b""
        """The snapshot as it was last written. `_pool_time` is the pool time as it was last written."""
        self._pool_time = 0.0
        self._inserted: Counter[str] = Counter()
        """Rows that were added to tables of which only the last rows are kept."""

    def commit(self, snapshot: Mapping[str, Any], pool_time: float | None = None) -> None:
        """Commit all changes since the last commit. Costs nothing if there are none.

        The pool time is written with other changes, and alone now and then.
        """
        dumped = seal(snapshot, "snapshot")
        if dumped != self._snapshot:
            self._put_meta("snapshot", dumped)
            self._snapshot = dumped
        if pool_time is not None and (any(self._pending) or pool_time >= self._pool_time + POOL_TIME_INTERVAL):
            self._put_meta("pool_time", seal(pool_time, "pool_time"))
            self._pool_time = pool_time
        self.commit_rows()

    def commit_rows(self) -> None:
        """Commit changes that leave the snapshot as it is."""
        if any(self._pending):
            self.store.commit(self._statements())
            self._clear_pending()

    def rewrite(self, snapshot: Mapping[str, Any], pool_time: float | None) -> str:
        """Replace all rows by the changes since the last commit. Returns the name under which the old ones are kept."""
        self._put_meta("snapshot", seal(snapshot, "snapshot"))
        if pool_time is not None:
            self._put_meta("pool_time", seal(pool_time, "pool_time"))
        aside = self.store.rewrite(self._statements())
        self._clear_pending()
        return aside

    def pool_time(self) -> float | None:
        """At which the pool stopped; None if it is new. If it is lost, the time of the last change stands for it."""
        for (value,) in self.store.rows("SELECT value FROM meta WHERE key = 'pool_time'"):
            return float(unseal(value, "pool_time"))
        return self.store.written_at

    def close(self) -> None:
        self.commit_rows()
        self.store.close()

    def save_group(self, group: Group) -> None:
        self._groups[group.seq] = group

    def save_trajectory(self, trajectory: Trajectory) -> None:
        self._trajectories[trajectory.number] = trajectory

    def add_step(self, trajectory: Trajectory, step: StoredStep, placement: Placement | None) -> None:
        self._added[step.number] = (trajectory.number, step, placement)

    def save_step(self, step: StoredStep) -> None:
        if step.number not in self._added:
            self._steps[step.number] = step

    def remove_trajectory(self, trajectory: Trajectory) -> None:
        self._trajectories[trajectory.number] = None
        for step in trajectory.steps.values():
            self._steps[step.number] = None
            self._added.pop(step.number, None)

    def remove_group(self, group: Group) -> None:
        self._groups[group.seq] = None
        for trajectory in group.trajectories.values():
            self.remove_trajectory(trajectory)

    def retire_group(self, group: Group) -> None:
        self.save_group(group)
        self.retired.append(group)

    def remove_retired(self) -> None:
        for group in self.retired:
            self.remove_group(group)
            group.dissolve()
        self.retired.clear()

    def note_archived(self, file: str) -> None:
        self._execute("INSERT INTO archived VALUES (?)", file)

    def archived(self) -> list[str]:
        """Committed files that are written, and may still have their temporary name."""
        return [row[0] for row in self.store.table("archived", "file") if row]

    def remove_archived(self, file: str) -> None:
        self._execute("DELETE FROM archived WHERE file = ?", file)

    def add_late_reward(self, late: LateReward) -> None:
        fields = {name: value for name, value in asdict(late).items() if name != "gateway"}
        self._execute("INSERT INTO late_rewards (info) VALUES (?)", seal(fields))

    def late_rewards(self) -> list[tuple[int, LateReward]]:
        """Committed ones that are not archived yet, each with its row number."""
        return [(n, LateReward(**fields)) for n, fields in self._readable("late_rewards")]

    def remove_late_rewards(self, last: int) -> None:
        """All up to that row number."""
        self._execute("DELETE FROM late_rewards WHERE n <= ?", last)

    def add_lineage(self, lease: Lease, at: float) -> None:
        if self.keeps_lineage:
            self.restore_lineage(lineage_of(lease, at))

    def add_version(self, version: int, at: float) -> None:
        if self.keeps_lineage:
            self.restore_lineage([LineageRow(version=version, at=at)])

    def restore_lineage(self, rows: Iterable[LineageRow]) -> None:
        dumped = [(seal(asdict(row)),) for row in rows]
        self.lineage_added += len(dumped)
        self._other.append(("INSERT INTO lineage (info) VALUES (?)", dumped))

    def lineage(self) -> list[tuple[int, LineageRow]]:
        """Committed rows that are not archived yet, each with its number."""
        return [(n, LineageRow(**fields)) for n, fields in self._readable("lineage")]

    def remove_lineage(self, last: int) -> None:
        """All up to that row number."""
        self._execute("DELETE FROM lineage WHERE n <= ?", last)

    def remove_late_named(self, is_wanted: Callable[[str, str, float], bool]) -> int:
        """Remove the committed rewards for whose trajectory_uid, prompt_uid and time this is true. Returns how many."""
        late = self.late_rewards()
        found = [(n,) for n, reward in late if is_wanted(reward.trajectory_uid, reward.prompt_uid, reward.at)]
        if found:
            self._other.append(("DELETE FROM late_rewards WHERE n = ?", found))
        return len(found)

    def save_tombstone(self, tombstone: Tombstone) -> None:
        self._execute(PUT_TOMBSTONE, tombstone.subject, seal(asdict(tombstone), tombstone.subject))

    def add_refused_names(self, digests: Sequence[str]) -> None:
        self._other.append((PUT_TOMBSTONE, [(digest, None) for digest in digests]))

    def remove_closed(self, subject: str, trajectory_uids: Sequence[str]) -> None:
        self._execute("DELETE FROM closed WHERE subject = ?", subject)
        self._other.append(("DELETE FROM closed WHERE uid = ?", [(uid,) for uid in trajectory_uids]))

    def add_closed(self, trajectory_uid: str, revision: int, subject: str = "") -> None:
        row = (trajectory_uid, revision, subject)
        self._execute("INSERT INTO closed (uid, revision, subject) VALUES (?, ?, ?)", *row)
        self._keep_last("closed", self._closed_kept)

    def save_lease(self, lease: Lease) -> None:
        key = (lease.uid, lease.channel, float(lease.expires_at))
        changed = "ON CONFLICT (uid) DO UPDATE SET expires_at = excluded.expires_at, gate = excluded.gate"
        gate = _info(lease.step_filter, FILTER_FIELDS, *key)
        self._execute(f"INSERT INTO leases VALUES (?, ?, ?, ?) {changed}", *key, gate)

    def end_lease(self, lease: Lease, how: Settlement) -> None:
        self._execute("DELETE FROM leases WHERE uid = ?", lease.uid)
        self.add_ended(lease.uid, how)

    def add_ended(self, lease_uid: str, how: Settlement) -> None:
        self._execute("INSERT INTO ended (uid, how) VALUES (?, ?)", lease_uid, how.value)
        self._keep_last("ended", ENDED_KEPT)

    def save_acknowledged(self, decision_uid: str) -> None:
        self._execute("INSERT INTO acknowledged VALUES (?)", decision_uid)

    def remove_acknowledged(self, decision_uid: str) -> None:
        self._execute("DELETE FROM acknowledged WHERE uid = ?", decision_uid)

    def save_row(self, name: str, key: str, value: object) -> None:
        self._execute(PUT_ROW, name, key, seal(value, name, key))

    def remove_row(self, name: str, key: str) -> None:
        self._execute("DELETE FROM slices WHERE slice = ? AND key = ?", name, key)

    def rows_of(self, name: str) -> Iterator[tuple[str, Any]]:
        for row in self.store.table("slices", "n, slice, key, info"):
            with suppress(ValueError):
                if row is not None and row[1] == name:
                    yield row[2], unseal(row[3], name, row[2])

    def save_decisions(self, decisions: Sequence[PolicyDecision]) -> None:
        self._put_meta("decisions", seal(list(decisions), "decisions"))

    def _readable(self, table: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The numbers and fields of its rows, without those that are damaged. Recovery has noticed these."""
        for row in self.store.table(table, "n, info"):
            with suppress(ValueError):
                if row is not None:
                    yield row[0], unseal(row[1])

    def _clear_pending(self) -> None:
        for pending in self._pending:
            pending.clear()

    def _execute(self, sql: str, *values: Any) -> None:
        self._other.append((sql, (values,)))

    def _put_meta(self, key: str, value: bytes) -> None:
        self._execute(PUT_META, key, value)

    def _keep_last(self, table: str, kept: int) -> None:
        """Now and then, delete the rows before the last `kept`."""
        self._inserted[table] += 1
        if self._inserted[table] % PRUNE_INTERVAL == 0:
            self._execute(f"DELETE FROM {table} WHERE n <= (SELECT max(n) FROM {table}) - ?", kept)

    def _statements(self) -> Iterator[Statement]:
        """Each changed row once, however often it changed since the last commit."""
        yield "DELETE FROM groups WHERE seq = ?", _removed(self._groups)
        yield "DELETE FROM trajectories WHERE number = ?", _removed(self._trajectories)
        yield "DELETE FROM steps WHERE number = ?", _removed(self._steps)
        groups = ((seq, _info(group, GROUP_FIELDS, seq)) for seq, group in self._groups.items() if group)
        yield "INSERT INTO groups VALUES (?, ?) ON CONFLICT (seq) DO UPDATE SET info = excluded.info", groups
        trajectories = (
            (n, t.group.seq, _info(t, TRAJECTORY_FIELDS, n, t.group.seq)) for n, t in self._trajectories.items() if t
        )
        changed = "group_seq = excluded.group_seq, info = excluded.info"
        yield f"INSERT INTO trajectories VALUES (?, ?, ?) ON CONFLICT (number) DO UPDATE SET {changed}", trajectories
        added = (_step_row(*added) for added in self._added.values())
        yield f"INSERT INTO steps VALUES ({', '.join('?' * 15)})", added
        states = ((*_sealed_state(step), number) for number, step in self._steps.items() if step)
        columns = "reward = ?, reward_source = ?, reward_revision = ?, lease = ?, shipped = ?, state_checksum = ?"
        yield f"UPDATE steps SET {columns} WHERE number = ?", states
        yield from self._other


def _removed(pending: Mapping[int, object]) -> list[tuple[int]]:
    return [(number,) for number, kept in pending.items() if kept is None]


def _step_row(trajectory: int, step: StoredStep, placement: Placement | None) -> tuple[Any, ...]:
    base, shared = (placement.base, placement.shared) if placement else (None, None)
    blobs = (
        None if placement is None else placement.added.data,
        None if step.logprobs is None else step.logprobs.data,
        None if step.mask is None else step.mask.view(np.uint8).data,
    )
    info = dump_json((*own_values(step), *step.carried))
    keys, (*state, state_checksum) = (step.number, trajectory, base, shared), _sealed_state(step)
    return (*keys, info, *state, *blobs, checksum(info, *blobs, keys=keys), state_checksum)


def _sealed_state(step: StoredStep) -> tuple[float | None, str, int, str | None, bool, int]:
    """What may change of a step, and a checksum of it."""
    reward = None if step.reward is None else float(step.reward) + 0.0  # SQLite has no -0.0
    state = (reward, step.reward_source, step.reward_revision, step.lease, step.shipped)
    return *state, checksum(keys=(step.number, *state))


def _info(of: Group | Trajectory | StepFilter, names: Iterable[str], *keys: object) -> bytes:
    return seal([getattr(of, name) for name in names], *keys)


class DiskFloor:
    def __init__(self, min_free: int, free_bytes: Callable[[], float], *, shard: str, place: str) -> None:
        """`place` is what is nearly full."""
        self._min_free = min_free
        self._free_bytes = free_bytes
        self._shard = shard
        self._place = place
        self._said = False

    def shortage(self) -> str | None:
        """Why no new data is taken, and what to do; None if there is room. The log has it once."""
        free = self._free_bytes()
        if free >= self._min_free:
            self._said = False
            return None
        text = (
            f"shard {self._shard} takes no new data: the disk of {self._place} has {free / MIB:.1f} MiB free, and "
            f"--min-free-bytes is {self._min_free / MIB:g} MiB. Free some space there, or let trainers take what the "
            "pool holds; steps wait in the gateways meanwhile"
        )
        if not self._said:
            self._said = True
            log.error("%s", text)
        return text


class GroupCommit:
    def __init__(self, commit: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        """After a failure it is not known what the journal has: nothing is committed any more."""
        self._commit = commit
        self._on_failure = on_failure
        self._waiting: list[asyncio.Future[None]] = []
        self._failure: Exception | None = None

    async def committed(self) -> None:
        """Return when all changes so far are committed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._commit_all)  # after all calls that can run now
        self._waiting.append(done)
        await done

    def _commit_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._failure is None:
            try:
                self._commit()
            except Exception as failure:  # noqa: BLE001 - whatever it is, memory and journal differ from now on
                self._failure = failure
                self._on_failure(failure)
        for done in waiting:
            if not done.done():  # a call that was cancelled
                if self._failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(PoolUnavailable(f"the journal failed: {self._failure}"))
