"""The journal of one shard: a SQLite file that mirrors the state of the shard.

- Each call is one transaction, committed before the call is answered. What was acknowledged survives a kill -9; the
  rest may be sent again.
- A row exists as long as the object that it mirrors. The size of the file follows the size of the state.
"""

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import orjson

from stepwell.common.sqlite_file import count_wal_frames, open_wal, set_aside_damaged
from stepwell.errors import JournalRefused
from stepwell.pool.api.curation import AuditEntry
from stepwell.pool.api.leasing import Settlement
from stepwell.pool.shard.late_rewards import LateReward
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.records import Group, Lease, Trajectory
from stepwell.pool.state.state_base import ENDED_KEPT
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.prefix_tree import Placement
from stepwell.steps.schema import CARRIED, STEP_COLUMNS
from stepwell.steps.step_filter import StepFilter

log = logging.getLogger("stepwell.pool")

SCHEMA_VERSION = max(7, *(column.journal_since for column in STEP_COLUMNS))
"""Raised with every change to a table or to the fields below. Fields that an older file lacks take their defaults."""
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, info BLOB);
CREATE TABLE IF NOT EXISTS trajectories (number INTEGER PRIMARY KEY, group_seq INTEGER, info BLOB);
CREATE TABLE IF NOT EXISTS steps (
    number INTEGER PRIMARY KEY, trajectory INTEGER, base INTEGER, shared INTEGER, info BLOB, reward REAL,
    reward_source TEXT, reward_revision INTEGER, lease TEXT, shipped INTEGER, added BLOB, logprobs BLOB, mask BLOB,
    checksum INTEGER
);
CREATE TABLE IF NOT EXISTS leases (uid TEXT PRIMARY KEY, channel TEXT, expires_at REAL, gate BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT, how TEXT);
CREATE TABLE IF NOT EXISTS closed (n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT, revision INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS late_rewards (n INTEGER PRIMARY KEY AUTOINCREMENT, info BLOB);
CREATE TABLE IF NOT EXISTS audit (n INTEGER PRIMARY KEY AUTOINCREMENT, info BLOB);
CREATE TABLE IF NOT EXISTS archived (file TEXT PRIMARY KEY) WITHOUT ROWID;
"""
CHECKPOINT_PAGES = 4_096
GROUP_FIELDS = (
    *("age", "prompt_uid", "channel", "size", "opened_at", "deadline", "attempts", "lease", "trained"),
    *("source", "given_up"),  # new fields come last, here and below
)
TRAJECTORY_FIELDS = (
    *("uid", "metadata", "completed", "reward", "reward_source", "reward_revision", "step_count"),
    *("reward_left_out", "rejected", "completed_at"),
)
STEP_FIELDS = (
    *("identity", "uid", "step_index", "prompt_length", "response_length", "policy_version", "version_spans"),
    *("metadata", "exactness", "finish_reason", "sampling", "extras", "started_at", "quarantine", "branch", "nbytes"),
    *("untrainable", *(column.name for column in STEP_COLUMNS if column.journal_since > 5)),
)
CARRIED_NAMES = tuple(column.name for column in CARRIED)
OWN_NAMES = tuple(name for name in STEP_FIELDS if name not in CARRIED_NAMES)
own_values = attrgetter(*OWN_NAMES)
in_journal_order = itemgetter(*map((*OWN_NAMES, *CARRIED_NAMES).index, STEP_FIELDS))
FILTER_FIELDS = ("min_exactness", "untrainable", "models")


class SqliteJournal(StateJournal):
    """Changes are collected until `commit` writes them in one transaction."""

    def __init__(self, path: Path, *, closed_kept: int) -> None:
        self.path = path
        self._closed_kept = closed_kept
        self.retired: list[Group] = []
        """Trained groups that are not archived yet. They still have their rows."""
        self._groups: dict[int, Group | None] = {}
        """Changes since the last commit; None for a removed object. The next three are alike."""
        self._trajectories: dict[int, Trajectory | None] = {}
        self._added: dict[int, tuple[int, StoredStep, Placement | None]] = {}
        self._steps: dict[int, StoredStep | None] = {}
        self._pending = (self._groups, self._trajectories, self._added, self._steps)
        self._snapshot = b""
        """As of the last commit. The next one is the database's count of changes at that time."""
        self._changes = 0
        self.torn_frames = 0
        """Frames at the end of the log that belong to no committed transaction. Nothing in them was acknowledged."""
        self.db = self._open()

    def commit(self, snapshot: Mapping[str, Any]) -> None:
        """Commit all changes since the last commit. Costs nothing if there are none."""
        dumped = _dump(snapshot)
        if dumped != self._snapshot:
            self.db.execute("INSERT OR REPLACE INTO meta VALUES ('snapshot', ?)", (dumped,))
            self._snapshot = dumped
        elif self.db.total_changes == self._changes and not any(self._pending):
            return
        self.commit_rows()

    def commit_rows(self) -> None:
        """Commit changes that leave the snapshot as it is."""
        self._write()
        self.db.execute("COMMIT")
        self.db.execute("BEGIN")
        self._changes = self.db.total_changes

    def close(self) -> None:
        self.commit_rows()
        self.db.close()

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

    def forget_retired(self) -> None:
        for group in self.retired:
            self.remove_group(group)
            group.dissolve()
        self.retired.clear()

    def note_archived(self, file: str) -> None:
        self.db.execute("INSERT INTO archived VALUES (?)", (file,))

    def archived(self) -> list[str]:
        """Files that are written, and may still have their temporary name."""
        return [file for (file,) in self.db.execute("SELECT file FROM archived")]

    def forget_archived(self, file: str) -> None:
        self.db.execute("DELETE FROM archived WHERE file = ?", (file,))

    def add_late_reward(self, late: LateReward) -> None:
        self.db.execute("INSERT INTO late_rewards (info) VALUES (?)", (_dump(late),))

    def late_rewards(self) -> list[tuple[int, LateReward]]:
        """Those that are not archived yet, each with its row number."""
        rows = self.db.execute("SELECT n, info FROM late_rewards ORDER BY n")
        return [(n, LateReward(**orjson.loads(info))) for n, info in rows]

    def forget_late_rewards(self, last: int) -> None:
        """All up to that row number."""
        self.db.execute("DELETE FROM late_rewards WHERE n <= ?", (last,))

    def add_closed(self, trajectory_uid: str, revision: int) -> None:
        row = (trajectory_uid, revision)
        n = self.db.execute("INSERT INTO closed (uid, revision) VALUES (?, ?)", row).lastrowid or 0
        if n % 1000 == 0:
            self.db.execute("DELETE FROM closed WHERE n <= ?", (n - self._closed_kept,))

    def save_lease(self, lease: Lease) -> None:
        row = (lease.uid, lease.channel, lease.expires_at, _info(lease.step_filter, FILTER_FIELDS))
        self.db.execute("INSERT INTO leases VALUES (?, ?, ?, ?)", row)

    def end_lease(self, lease: Lease, how: Settlement) -> None:
        self.db.execute("DELETE FROM leases WHERE uid = ?", (lease.uid,))
        self.add_ended(lease.uid, how)

    def add_ended(self, lease_uid: str, how: Settlement) -> None:
        n = self.db.execute("INSERT INTO ended (uid, how) VALUES (?, ?)", (lease_uid, how.value)).lastrowid or 0
        if n % 1000 == 0:
            self.db.execute("DELETE FROM ended WHERE n <= ?", (n - ENDED_KEPT,))

    def add_audit(self, entry: AuditEntry) -> None:
        self.db.execute("INSERT INTO audit (info) VALUES (?)", (_dump(entry),))

    def replace_file(self) -> Path:
        """Set the damaged file aside and open an empty one. Returns the path of the old file."""
        self.db.close()
        aside = set_aside_damaged(self.path)
        self.db = self._open()
        return aside

    def _write(self) -> None:
        """Write each changed row once, however often it changed since the last commit."""
        many = self.db.executemany
        many("DELETE FROM groups WHERE seq = ?", _removed(self._groups))
        many("DELETE FROM trajectories WHERE number = ?", _removed(self._trajectories))
        many("DELETE FROM steps WHERE number = ?", _removed(self._steps))
        groups = ((seq, _info(group, GROUP_FIELDS)) for seq, group in self._groups.items() if group)
        many("INSERT OR REPLACE INTO groups VALUES (?, ?)", groups)
        trajectories = ((n, t.group.seq, _info(t, TRAJECTORY_FIELDS)) for n, t in self._trajectories.items() if t)
        many("INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?)", trajectories)
        many(f"INSERT INTO steps VALUES ({', '.join('?' * 14)})", (_step_row(*added) for added in self._added.values()))
        states = ((*_state(step), number) for number, step in self._steps.items() if step)
        columns = "reward = ?, reward_source = ?, reward_revision = ?, lease = ?, shipped = ?"
        many(f"UPDATE steps SET {columns} WHERE number = ?", states)
        for pending in self._pending:
            pending.clear()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._open_file()
        except sqlite3.OperationalError as failure:
            raise JournalRefused(f"journal {self.path} cannot be opened: {failure}") from None
        except sqlite3.DatabaseError as failure:
            aside = set_aside_damaged(self.path)
            log.error(
                "journal %s is damaged, nothing can be read: %s; it is set aside as %s", self.path, failure, aside
            )
            return self._open_file()

    def _open_file(self) -> sqlite3.Connection:
        wal_frames = count_wal_frames(self.path)
        db = open_wal(self.path)
        try:
            recovered_frames = int(db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
            self.torn_frames = max(0, wal_frames - recovered_frames)
            db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            self._check_schema(db)
            db.executescript(TABLES)
            _upgrade(db)
            db.execute("BEGIN")
            db.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION).encode(),))
        except BaseException:
            db.close()
            raise
        return db

    def _check_schema(self, db: sqlite3.Connection) -> None:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return
        row = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        found = int(row[0]) if row else 0
        if found > SCHEMA_VERSION:
            raise JournalRefused(
                f"journal {self.path} has schema version {found}, and this Stepwell reads up to {SCHEMA_VERSION}; "
                "use the newer Stepwell that wrote it, or another --journal"
            )


def _upgrade(db: sqlite3.Connection) -> None:
    """Add columns that an older file lacks: the step filter of leases (version 2), the closed revision (version 3)."""
    if "gate" not in {name for _, name, *_ in db.execute("PRAGMA table_info(leases)")}:
        db.execute("""ALTER TABLE leases ADD COLUMN gate BLOB DEFAULT '["submitted", false]'""")
    if "revision" not in {name for _, name, *_ in db.execute("PRAGMA table_info(closed)")}:
        db.execute("ALTER TABLE closed ADD COLUMN revision INTEGER DEFAULT 0")


def checksum(*parts: bytes | memoryview | None) -> int:
    """Detects a flipped bit in a row, which SQLite does not."""
    value = 0
    for part in parts:
        if part is not None:
            value = crc32(part, value)
    return value


def _removed(pending: Mapping[int, object]) -> list[tuple[int]]:
    return [(number,) for number, kept in pending.items() if kept is None]


def _step_row(trajectory: int, step: StoredStep, placement: Placement | None) -> tuple[Any, ...]:
    base, shared = (placement.base, placement.shared) if placement else (None, None)
    blobs = (
        None if placement is None else placement.added.data,
        None if step.logprobs is None else step.logprobs.data,
        None if step.mask is None else step.mask.view(np.uint8).data,
    )
    info = _dump(in_journal_order((*own_values(step), *step.carried)))
    return (step.number, trajectory, base, shared, info, *_state(step), *blobs, checksum(info, *blobs))


def _state(step: StoredStep) -> tuple[float | None, str, int, str | None, bool]:
    return step.reward, step.reward_source, step.reward_revision, step.lease, step.shipped


def _info(of: Group | Trajectory | StepFilter, names: Iterable[str]) -> bytes:
    return _dump([getattr(of, name) for name in names])


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, say
        return json.dumps(value).encode()
