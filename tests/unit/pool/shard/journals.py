"""Pools with a journal, opened, killed and opened again."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

from stepwell.pool.shard.journal_store import JournalHeader, JournalIdentity, unseal

from rig.builders import EasyPool, make_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, RewardGiven
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.archive_files import LateReward
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.placement import find_journals
from stepwell.pool.shard.recovery import RecoveryReport, restore_pool
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.step import Exactness


@dataclass(frozen=True, slots=True)
class PostgresPlace:
    url: str
    shard: str


Place: TypeAlias = Path | PostgresPlace
"""Where a journal is: a file, or a schema in a database."""

opened: list[ShardJournal] = []


@overload
def open_pool(place: Path, limits: Limits | None = None) -> tuple[EasyPool, SqliteJournal, RecoveryReport]: ...


@overload
def open_pool(place: Place, limits: Limits | None = None) -> tuple[EasyPool, ShardJournal, RecoveryReport]: ...


def open_pool(place: Place, limits: Limits | None = None) -> tuple[EasyPool, ShardJournal, RecoveryReport]:
    limits = limits or Limits()
    journal = open_journal(place, closed_kept=limits.closed_kept)
    opened.append(journal)
    pool = EasyPool(limits, journal)
    return pool, journal, restore_pool(pool, journal)


def open_journal(
    place: Place, identity: JournalIdentity | None = None, *, closed_kept: int = 100, must_exist: bool = False
) -> ShardJournal:
    if isinstance(place, Path):
        return SqliteJournal(place, identity, closed_kept=closed_kept, must_exist=must_exist)
    from stepwell.pool.shard.postgres_journal import PostgresStore

    store = PostgresStore(place.url, place.shard, identity, must_exist=must_exist)
    return ShardJournal(store, closed_kept=closed_kept)


def header_of(place: Place) -> JournalHeader:
    """As another process finds it."""
    if isinstance(place, Path):
        return find_journals(str(place.parent), place.stem)[place.stem]
    return find_journals(place.url, place.shard)[place.shard]


def save(pool: EasyPool, journal: ShardJournal) -> None:
    journal.commit(pool.state.snapshot())


def spoil(journal: ShardJournal, statement: str, *values: object) -> None:
    """Change rows behind the back of the shard, and kill it."""
    journal.store.commit([(statement, [values])])
    kill(journal)


def kill(journal: ShardJournal) -> None:
    """The process is gone: nothing is closed in order, what was not committed is lost."""
    journal.store.close()


def rows(journal: ShardJournal) -> dict[str, int]:
    tables = ("groups", "trajectories", "steps", "leases")
    return {table: next(journal.store.rows(f"SELECT count(*) FROM {table}"))[0] for table in tables}


def meta(journal: ShardJournal, key: str) -> Any:
    ((value,),) = journal.store.rows(f"SELECT value FROM meta WHERE key = '{key}'")
    return unseal(value, key)


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
