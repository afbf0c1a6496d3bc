"""What is too old goes the way of a forgotten subject: from the pool and from every file, also after a SIGKILL."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from stepwell.pool.slices.producing import AddSteps, PlaceSession, Register

from rig import forgetting as rig
from rig.asked import asked
from rig.builders import make_step
from rig.forgetting import ALICE, BOB, PLACES
from rig.local_pool import LocalPool, LocalTransport
from stepwell.commands.forget import forget_kept_back, forget_overdue
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.pool.api.sessions import RETENTION, SessionCall, SessionPlace, session_prompt_uid
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.pool.slices.forgetting import FindOverdue, ForgetOverdue
from stepwell.pool.slices.forgetting_work import Forgetting
from stepwell.pool.state.tombstones import AGE
from stepwell.steps.arrow import ParquetReader, ParquetWriter, step_groups_to_arrow
from stepwell.steps.columns import pack
from stepwell.steps.groups import StepGroup

DAY = 86_400.0
STEPS = (
    *("gateways", "waiting", "archive", "replace", "names", "archive _rewards", "replace _rewards"),
    *("scrub", "done", "end"),
)


@contextmanager
def opened(
    journal: Path,
    archive: Path,
    plan: PoolPlan = rig.PLAN,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[ShardService, ParquetArchive]]:
    opened_journal = rig.open_journal(str(journal))
    try:
        yield rig.open_shard(opened_journal, str(archive), plan, clock, monotonic)
    finally:
        opened_journal.store.close()


class Clock:
    """The wall clock and the monotonic one of a shard's machine."""

    def __init__(self) -> None:
        self.ahead = self.ran = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead + self.ran

    def monotonic(self) -> float:
        return time.monotonic() + self.ran


async def until_run(shard: ShardService, after: float = 0.0) -> None:
    """Until the shard has looked for what is too old, by itself, after that time, and has removed it."""
    await shard.stats()
    tombstones = shard.pool.state.tombstones
    async with asyncio.timeout(60):
        while AGE not in tombstones.subjects or tombstones.subjects[AGE].at < after or tombstones.unfinished:
            await asyncio.sleep(0.01)


async def look_often(shard: ShardService) -> None:
    """From the next call on, instead of once an hour."""
    forgetting = shard.pool.state.slice_of(Forgetting)
    forgetting.retention_interval = 0.05
    if forgetting.watching is not None:
        forgetting.watching.cancel()
        await asyncio.gather(forgetting.watching, return_exceptions=True)


def held(shard: ShardService) -> set[str]:
    return {*shard.pool.state.trajectories, *shard.pool.state.history}


def archived(archive: Path) -> set[str]:
    return {found.steps[0].trajectory_uid for found in ParquetReader(str(archive)).trajectories()}


async def test_nothing_that_is_too_old_is_in_any_file_and_all_that_is_younger_is(tmp_path: Path) -> None:
    state, archive = tmp_path / "state", tmp_path / "archive"
    with opened(state, archive) as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 40, BOB: 20})
        (state / "data_pool.sqlite.damaged-0").write_text(ALICE)
        before = rig.traces(BOB, archive)
        receipt = await shard.run_long(ForgetOverdue(30 * DAY))
        assert rig.traces(ALICE, state, archive) == set()
        assert rig.traces(BOB, archive) == before
        assert held(shard) == {rig.session_of(BOB, place) for place in ("history", "leased", "open", "ready")}
        assert archived(archive) == {rig.session_of(BOB, place) for place in ("archived", "second")}
        dropped = (await shard.stats()).channels["train"].dropped
        assert {cause: count.steps for cause, count in dropped.items()} == {"expired": 3}, "queued and leased ones"
    assert receipt.is_done
    where = [one["where"] for one in receipt.removed["trajectories"].values()]
    assert sorted(where) == ["archive", "archive", "archive queue", "history", "lease", "queue", "queue"]
    assert receipt.removed["late_rewards"] == 1
    assert receipt.removed["audit_entries"] == 2
    assert receipt.removed["quarantined"] == len(PLACES)
    assert receipt.removed["versions"] == [1], "the first version after the batches that had it"
    assert ALICE not in str(receipt)


@pytest.mark.parametrize("step", STEPS)
async def test_a_kill_before_any_step_leaves_nothing_once_the_shard_runs_again(tmp_path: Path, step: str) -> None:
    state, archive = tmp_path / "state", tmp_path / "archive"
    assert rig.run_killed(str(state), archive, step, older_than=30 * DAY) == -signal.SIGKILL
    assert bool(rig.traces(ALICE, state, archive)) is (step not in ("done", "end"))
    with opened(state, archive) as (shard, _):
        await shard.stats()
        await until_run(shard)
        assert rig.traces(ALICE, state, archive) == set()
        assert archived(archive) == {rig.session_of(BOB, place) for place in ("archived", "second")}
        receipt = shard.pool.state.slice_of(Forgetting).receipt(shard.pool.state.tombstones.subjects["age"])
        assert {one["where"] for one in receipt.removed["trajectories"].values()} > {"queue", "lease", "archive"}


KEPT_30_DAYS = replace(rig.PLAN, limits=Limits(history_size=2, retention=30 * DAY))


async def test_a_pool_with_a_retention_removes_by_itself(tmp_path: Path) -> None:
    state, archive, clock = tmp_path / "state", tmp_path / "archive", Clock()
    with opened(state, archive, KEPT_30_DAYS, clock.wall, clock.monotonic) as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 0, BOB: -25})
        clock.ran = 31 * DAY
        await look_often(shard)
        await until_run(shard, clock.wall())
        assert rig.traces(ALICE, state, archive) == set()
        assert rig.traces(BOB, archive)
        assert (await shard.stats()).overdue_by_clock == 0


async def test_a_clock_that_is_wrong_for_a_minute_removes_nothing(tmp_path: Path) -> None:
    """60 days ahead, in the pool and in the archive."""
    state, archive, clock = tmp_path / "state", tmp_path / "archive", Clock()
    with opened(state, archive, KEPT_30_DAYS, clock.wall, clock.monotonic) as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 0, BOB: 0})
        before, in_archive = held(shard), archived(archive)
        clock.ahead = 60 * DAY
        overdue = await shard.run_long(FindOverdue())
        assert (overdue.trajectories, overdue.archived) == (len(before), len(in_archive))
        assert overdue.clock - overdue.since > 60 * DAY - 60
        assert (await shard.stats()).overdue_by_clock == len(before) + len(in_archive)
        clock.ran += 60
        clock.ahead = 0.0
        assert (await shard.run_long(FindOverdue())).count == 0
        assert (await shard.stats()).overdue_by_clock == 0
        assert (held(shard), archived(archive)) == (before, in_archive)
        clock.ran += 30 * DAY
        assert (await shard.run_long(FindOverdue())).count == 0
        assert (held(shard), list(archive.glob("*.parquet"))) == (set(), []), "what is due by now is removed as ever"


async def test_a_gateway_whose_clock_is_behind_loses_no_data(tmp_path: Path) -> None:
    with opened(tmp_path / "state", tmp_path / "archive", KEPT_30_DAYS) as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 60, BOB: 0})
        before = held(shard)
        assert (await shard.run_long(FindOverdue())).trajectories > 0
        assert held(shard) == before


async def test_after_the_pool_was_off_a_person_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For 60 days. What comes later needs nobody's decision."""
    state, archive, clock = tmp_path / "state", tmp_path / "archive", Clock()
    with opened(state, archive, KEPT_30_DAYS, clock.wall, clock.monotonic) as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 0, BOB: 0})
        before = held(shard)
    clock.ahead = 60 * DAY
    with opened(state, archive, KEPT_30_DAYS, clock.wall, clock.monotonic) as (shard, _):
        await shard.run([Register(Registration("later", "later"))])
        await asked(shard, AddSteps(pack([make_step("later", "later", uid="1", started_at=clock.wall())])))
        await until_run(shard)
        async with asyncio.timeout(60):
            while not (await shard.stats()).overdue_by_clock:
                await asyncio.sleep(0.01)
        assert held(shard) == before | {"later"}
        pool = PoolClient("data_pool", transport=LocalTransport({"data_pool": shard}))
        assert caplog.text.count("If the clock is right, and the pool was off: stepwell forget --overdue") == 1
        told = await forget_kept_back(pool, confirm=False)
        assert re.search(r"data_pool: 8 trajectories in the pool and 4 in the archive, the oldest of \d{4}-", told)
        assert held(shard) == before | {"later"}
        assert "trajectories" in await forget_kept_back(pool, confirm=True)
        assert rig.traces(ALICE, state, archive) == rig.traces(BOB, state, archive) == set()
        assert held(shard) == {"later"}
        assert (await shard.stats()).overdue_by_clock == 0
        clock.ran += 31 * DAY
        await shard.run_long(FindOverdue())
        assert held(shard) == set()


async def test_a_trajectory_can_be_opened_with_a_shorter_retention(tmp_path: Path) -> None:
    state, archive, clock = tmp_path / "state", tmp_path / "archive", Clock()
    with opened(state, archive, rig.PLAN, clock.wall, clock.monotonic) as (shard, files):
        await shard.run([Register(Registration("first", "first", metadata={RETENTION: 10 * DAY}))])
        await until_run(shard)
        await rig.fill(shard, files, days_ago={ALICE: 0, BOB: 0}, metadata={ALICE: {RETENTION: DAY}})
        clock.ran = 2 * DAY
        await look_often(shard)
        await until_run(shard, clock.wall())
        assert rig.traces(ALICE, state, archive) == set()
        assert rig.traces(BOB, archive)
        bobs = {rig.session_of(BOB, place) for place in ("history", "leased", "open", "ready")}
        assert held(shard) == {"first", *bobs}


async def test_a_session_goes_on_after_its_old_part_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path / "state", tmp_path / "archive") as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 40, BOB: 20})
        await shard.run_long(ForgetOverdue(30 * DAY))
        session = rig.session_of(ALICE, "open")
        (place,) = await shard.run([PlaceSession(SessionCall(session, "new", ALICE))])
        assert isinstance(place, SessionPlace)
        step = make_step(place.trajectory_uid, session_prompt_uid(session), uid="9")
        assert await asked(shard, AddSteps(pack([step]))) == [SubmitVerdict.ACCEPTED]


async def test_a_run_that_finds_nothing_does_not_write_the_journal_again(tmp_path: Path) -> None:
    steps: list[str] = []
    with opened(tmp_path / "state", tmp_path / "archive") as (shard, files):
        await rig.fill(shard, files, days_ago={ALICE: 40, BOB: 20})
        await shard.run_long(ForgetOverdue(30 * DAY))
        shard.pool.state.slice_of(Forgetting).before_step = steps.append
        receipt = await shard.run_long(ForgetOverdue(30 * DAY))
    assert "scrub" not in steps
    assert receipt.removed == {"older_than": 30 * DAY}, "the receipt is of the last run"


async def test_all_shards_and_further_folders_are_cleaned(tmp_path: Path) -> None:
    pool, now = LocalPool(shards=3, uid="pool", clock=time.time), time.time()
    for n in range(6):
        for age in (40, 20):
            uid = f"{age}-{n}"
            await pool.register_trajectory(Registration(uid, f"p{n}", group_size=2))
            step = make_step(uid, f"p{n}", uid="1", started_at=now - age * DAY)
            assert await pool.submit_steps([step]) == [SubmitVerdict.ACCEPTED]
    folder = tmp_path / "export"
    groups = [StepGroup(pack([make_step(f"{age}", started_at=now - age * DAY)]), "", "train") for age in (40, 20)]
    without_time = [StepGroup(pack([make_step("timeless")]), "", "train")]
    for name, found in (("x", groups), ("old", without_time), ("new", without_time)):
        with ParquetWriter(str(folder)).writing(f"{name}.parquet") as write:
            write(step_groups_to_arrow(found, 0))
    os.utime(folder / "old.parquet", (now - 40 * DAY, now - 40 * DAY))
    receipt = await forget_overdue(pool, 30 * DAY, [str(folder)])
    removed = receipt["further_archives"][str(folder)]
    assert {name: file["rows"] for name, file in removed.items()} == {"x.parquet": 1, "old.parquet": 1}
    assert receipt["older_than"] == 30 * DAY
    assert sum(len(shard["trajectories"]) for shard in receipt["shards"].values() if "trajectories" in shard) == 6
    left = {uid for shard in pool.transport.services.values() for uid in shard.pool.state.trajectories}
    assert left == {f"20-{n}" for n in range(6)}
