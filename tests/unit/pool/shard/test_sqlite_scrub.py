"""What was deleted is in no byte of the journal's files after a scrub, and the shard serves meanwhile."""

import asyncio
import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from stepwell.pool.shard.journal_store import OLD

from stepwell.pool.api.plan import JournalSync
from stepwell.pool.shard.sqlite_journal import IN_USE, SqliteJournal, SqliteStore
from tests.unit.pool.shard.marked_rows import MarkedRows, never


def marks_in(path: Path) -> set[int]:
    files = [file for file in path.parent.glob(f"{path.name}*") if file.is_file()]
    return {int(found) for file in files for found in re.findall(rb"MARK(\d{8})\|", file.read_bytes())}


def open_journal(path: Path) -> SqliteStore:
    return SqliteJournal(path, closed_kept=100, sync=JournalSync.NORMAL).file


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_that_was_deleted_is_left_though_rows_move_between_pages(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "pool.sqlite"
    with closing(open_journal(path)) as store:
        rows = MarkedRows(store, seed)
        rows.change(200)
        await store.scrub(never)
        assert marks_in(path) == rows.live
        rows.check()


async def test_what_changes_while_rows_move_is_kept_and_what_is_deleted_then_is_gone_after_the_next(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pool.sqlite"
    with closing(open_journal(path)) as store:
        rows = MarkedRows(store)
        rows.change(100)
        before = {*rows.live}
        scrubbing = asyncio.create_task(store.scrub(never))
        changes = 0
        while not scrubbing.done():
            rows.change(1)
            changes += 1
            await asyncio.sleep(0)
        assert changes > 5, "the loop is free between pieces"
        rows.check()
        await store.scrub(never)
        assert marks_in(path) == rows.live != before


@pytest.mark.parametrize("pieces", [1, 10, 14, 20])
async def test_a_process_that_ends_while_rows_move_loses_none_and_the_next_goes_on(tmp_path: Path, pieces: int) -> None:
    path = tmp_path / "pool.sqlite"
    store = open_journal(path)
    rows = MarkedRows(store)
    rows.change(100)
    for _, _ in zip(range(pieces), store.scrubber.pieces(), strict=False):
        pass
    live = rows.live
    store.close()
    with closing(open_journal(path)) as store:
        rows = MarkedRows(store)
        rows.live = live
        rows.check()
        rows.remove([min(live)])
        rows.check()
        await store.scrub(never)
        rows.check()
        assert marks_in(path) == live
        assert not [name for (name,) in store.db.execute("SELECT name FROM sqlite_master") if name.endswith(OLD)]


async def test_the_index_of_steps_stays(tmp_path: Path) -> None:
    with closing(open_journal(tmp_path / "pool.sqlite")) as store:
        MarkedRows(store).change(20)
        before = _indexes(store)
        await store.scrub(never)
        assert _indexes(store) == before != []


def _indexes(store: SqliteStore) -> list[tuple[str, str]]:
    found = store.db.execute("SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    return [(name, table) for name, table, _ in found]


async def test_a_reader_of_the_file_delays_the_end_and_no_commit(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with closing(open_journal(path)) as store, closing(sqlite3.connect(path)) as backup:
        rows = MarkedRows(store)
        rows.change(50)
        backup.execute("BEGIN")
        backup.execute("SELECT count(*) FROM steps").fetchone()
        rows.change(10)
        waits = Waits(lambda: backup.execute("COMMIT"))
        await store.scrub(waits)
        assert waits.reasons == [IN_USE] * 2
        assert marks_in(path) == rows.live


async def test_row_numbers_are_not_given_again(tmp_path: Path) -> None:
    with closing(open_journal(tmp_path / "pool.sqlite")) as store:
        for _ in range(3):
            store.commit([("INSERT INTO late_rewards (info) VALUES (?)", [(b"one",)])])
        store.commit([("DELETE FROM late_rewards WHERE n <= ?", [(3,)])])
        await store.scrub(never)
        store.commit([("INSERT INTO late_rewards (info) VALUES (?)", [(b"four",)])])
        assert [*store.rows("SELECT n, info FROM late_rewards")] == [(4, b"four")]


class Waits:
    """A reason to wait ends at the second time."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.reasons: list[str] = []
        self._end = end

    def __call__(self, why: str) -> Awaitable[None]:
        self.reasons.append(why)
        if len(self.reasons) == 2:
            self._end()
        return asyncio.sleep(0)
