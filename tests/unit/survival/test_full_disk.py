"""D3: a full disk ends a shard and costs nothing that was acknowledged; a nearly full one takes no new data."""

import asyncio
from pathlib import Path

import pytest
from stepwell.pool.slices.producing import AddSteps, Complete, Register

from rig.asked import asked
from rig.builders import make_step
from rig.local_pool import LocalTransport
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.leasing import BatchRequest, Settlement
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.curation import ReadAudit
from stepwell.steps.columns import pack

TOKENS = range(20_000)


def open_service(
    path: Path, ended: list[str] | None = None, *, min_free_bytes: int = 0
) -> tuple[ShardService, SqliteJournal]:
    journal = SqliteJournal(path, closed_kept=100)
    service = ShardService(
        PoolPlan(journal=str(path.parent), min_free_bytes=min_free_bytes),
        "data_pool",
        journal=journal,
        on_journal_failure=lambda: None if ended is None else ended.append("ended"),
    )
    return service, journal


async def submit(service: ShardService, n: int) -> SubmitVerdict:
    (answer,) = await service.run([Register(Registration(f"t{n}", f"p{n}"))])
    if isinstance(answer, Exception):
        raise answer
    (verdict,) = await asked(service, AddSteps(pack([make_step(f"t{n}", f"p{n}", uid=f"s{n}", prompt_ids=TOKENS)])))
    return verdict


def fill_disk(journal: SqliteJournal, pages: int) -> None:
    """From so many more pages on, SQLite says what it says on a full disk."""
    used = journal.db.execute("PRAGMA page_count").fetchone()[0]
    journal.db.execute(f"PRAGMA max_page_count = {used + pages}")


async def test_a_shard_whose_disk_is_full_ends_and_its_successor_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    ended: list[str] = []
    service, journal = open_service(tmp_path / "pool.sqlite", ended)
    fill_disk(journal, 60)
    acknowledged = 0
    with pytest.raises(PoolUnavailable, match="database or disk is full"):
        while await submit(service, acknowledged) is SubmitVerdict.ACCEPTED:
            acknowledged += 1
    assert 0 < acknowledged < 60
    assert ended == ["ended"]
    journal.store.close()
    service, journal = open_service(tmp_path / "pool.sqlite")
    assert [await submit(service, n) for n in range(acknowledged)] == [SubmitVerdict.DUPLICATE] * acknowledged
    assert await submit(service, acknowledged) is SubmitVerdict.ACCEPTED
    journal.close()


async def test_after_a_failed_commit_nothing_is_answered_from_memory(tmp_path: Path) -> None:
    service, journal = open_service(tmp_path / "pool.sqlite")
    await submit(service, 0)
    fill_disk(journal, 0)
    with pytest.raises(PoolUnavailable, match="disk is full"):
        await submit(service, 1)
    fill_disk(journal, 1_000)
    for call in (
        service.stats(),
        service.plan(),
        service.serving(),
        service.read([("t1", "p1")]),
        asked(service, ReadAudit(1)),
    ):
        with pytest.raises(PoolUnavailable, match="restarts from its journal"):
            await call
    journal.store.close()


async def test_calls_that_share_a_failed_commit_all_fail(tmp_path: Path) -> None:
    service, journal = open_service(tmp_path / "pool.sqlite")
    await submit(service, 0)
    fill_disk(journal, 0)
    steps = [pack([make_step("t0", "p0", uid=f"more-{n}", prompt_ids=range(n + 1, 20_000))]) for n in range(3)]
    answers = await asyncio.gather(*(asked(service, AddSteps(each)) for each in steps), return_exceptions=True)
    assert [type(answer) for answer in answers] == [PoolUnavailable] * 3
    journal.store.close()


async def test_a_nearly_full_disk_takes_no_new_data_and_serves_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, journal = open_service(tmp_path / "pool.sqlite")
    await submit(service, 0)
    journal.close()
    service, journal = open_service(tmp_path / "pool.sqlite", min_free_bytes=2**60)
    with pytest.raises(PoolUnavailable, match=r"takes no new data: .* MiB free.*--min-free-bytes.*Free some space"):
        await asked(service, AddSteps(pack([make_step("t0", "p0", uid="another")])))
    with pytest.raises(PoolUnavailable, match="takes no new data"):
        await submit(service, 1)
    assert (await service.stats()).short_of_disk == 1
    client = PoolClient("data_pool", transport=LocalTransport({"data_pool": service}))
    with pytest.raises(PoolUnavailable, match="data_pool: no new data is taken, .* Free some space"):
        await client.check()
    assert await service.run([Complete("t0", "p0", 1.0)]) == [EndResult.COMPLETED]
    leased = await service.take(BatchRequest(count=1, channel="train"), 60.0, "lease")
    assert leased is not None
    assert leased.columns.trajectory_uids == ["t0"]
    assert await service.ack("lease") is Settlement.DONE
    assert caplog.text.count("takes no new data") == 1
    journal.close()
