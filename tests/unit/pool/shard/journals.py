"""Pools with a journal, opened, killed and opened again."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.late_rewards import LateReward
from stepwell.pool.shard.recovery import RecoveryReport, restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.step import Exactness
from tests.builders import EasyPool, make_step

opened: list[SqliteJournal] = []


def open_pool(path: Path, limits: Limits | None = None) -> tuple[EasyPool, SqliteJournal, RecoveryReport]:
    limits = limits or Limits()
    journal = SqliteJournal(path, closed_kept=limits.closed_kept)
    opened.append(journal)
    pool = EasyPool(limits, journal)
    return pool, journal, restore_pool(pool, journal)


def save(pool: EasyPool, journal: SqliteJournal) -> None:
    journal.commit(pool.state.snapshot())


def kill(journal: SqliteJournal) -> None:
    """The process is gone: nothing is closed in order, what was not committed is lost."""
    journal.store.close()


def rows(journal: SqliteJournal) -> dict[str, int]:
    tables = ("groups", "trajectories", "steps", "leases")
    return {table: journal.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def meta(journal: SqliteJournal, key: str) -> Any:
    (value,) = journal.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return orjson.loads(value)


def mixed_rollout(pool: EasyPool) -> None:
    """A step for every trainer, one that is marked, and one of a low grade."""
    pool.register(Registration("t", "p"))
    pool.submit(
        [
            make_step(uid="plain"),
            make_step(uid="greedy", started_at=1, untrainable="greedy: temperature is 0"),
            make_step(uid="again", started_at=2, exactness=Exactness.RETOKENIZED),
        ]
    )
    pool.complete("t", "p", 1.0)


def give_late(pool: EasyPool, archive: ParquetArchive, value: float) -> None:
    reward = RewardGiven(trajectory_uid="t", prompt_uid="p", value=value, source="human", notes="on second thoughts")
    assert not pool.ingest.reward(reward)
    archive.add_late_reward(LateReward(**asdict(reward), revision=pool.state.count_late_reward("t"), at=10.0))
