import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rig.builders import make_step, same_step
from rig.local_pool import LocalPool
from rig.waiting import until, wait_until
from stepwell.errors import PoolUnavailable, StepwellError
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.spool import MAX_ROW, Spool
from stepwell.gateway.recording.step_book import HeldStep
from stepwell.pool.api.producing import Registration
from stepwell.steps.columns import from_bytes, to_bytes
from stepwell.steps.step import Exactness, Step, VersionSpan, mask_array

RunOutbox = Callable[..., AbstractAsyncContextManager[Outbox]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spools" / "gateway.spool"


@pytest.fixture
def pool() -> LocalPool:
    pool = LocalPool()
    pool.rules.register(Registration("t", "p"))
    return pool


@pytest.fixture
def run_outbox(pool: LocalPool) -> RunOutbox:
    """A outbox that delivers, with that spool."""

    @asynccontextmanager
    async def run(spool: Spool, **options: Any) -> AsyncIterator[Outbox]:
        outbox = Outbox(pool, on_refused=lambda _: None, spool=spool, retry_pause=0.001, **options)
        running = asyncio.create_task(outbox.run())
        yield outbox
        running.cancel()

    return run


def held(*steps: Step) -> list[HeldStep]:
    return [HeldStep(step.uid, step.trajectory_uid, step) for step in steps]


def left_in(path: Path) -> list[str]:
    """The uids that a process started now would find."""
    with closing(Spool(path)) as spool:
        return [left.uid for left in spool.take_leftovers()]


def leave(path: Path, *steps: Step) -> None:
    with closing(Spool(path)) as spool:
        spool.add(held(*steps))


def file_size(path: Path) -> int:
    return path.stat().st_size


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Meanwhile no file of this process can grow beyond that, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_added_is_found_again_in_order_and_in_every_field(path: Path) -> None:
    steps = [
        make_step(uid="plain"),
        make_step("t2", "p2", step_index=3, reward=0.5, is_last=True, response_ids=[7, 8, 9], response_logprobs=None),
        make_step(
            uid="rich",
            exactness=Exactness.ENGINE,
            version_spans=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)),
            response_mask=mask_array([True, False]),
            sampling={"temperature": 0.7, "stop": ["\ud800", "é"]},
            extras={"large": 2**80, "nested": [{"a": None}]},
            quarantine="miscount: 2 are not 3",
        ),
    ]
    leave(path, *steps)
    with closing(Spool(path)) as spool:
        found = [left.step for left in spool.take_leftovers() if left.step is not None]
    assert len(found) == 3
    assert all(map(same_step, steps, found))


def test_bytes_of_another_version_are_refused() -> None:
    other = to_bytes([make_step()]).replace(b'"layout"', b'"places"')
    with pytest.raises(ValueError, match="no packed steps of this version"):
        from_bytes(other)


def test_what_was_removed_is_gone_whether_or_not_it_had_been_written(path: Path) -> None:
    steps = held(*(make_step(uid=str(i)) for i in range(3 * MAX_ROW)))
    with closing(Spool(path)) as spool:
        spool.add(steps)
        spool.remove(steps[:10])
    assert left_in(path) == [step.uid for step in steps[10:]]
    with closing(Spool(path)) as spool:
        spool.remove(spool.take_leftovers())
    assert left_in(path) == []


def test_a_spool_that_another_gateway_has_is_refused(path: Path) -> None:
    leave(path, make_step(uid="a"))
    with (
        closing(Spool(path)),
        pytest.raises(StepwellError, match=f"spool {path} is in use by another gateway; give each"),
    ):
        Spool(path)
    assert left_in(path) == ["a"]


def test_a_spool_that_cannot_be_opened_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StepwellError, match="cannot be used: unable to open database file"):
        Spool(tmp_path)


@pytest.mark.parametrize("content", [b"this is no database at all, whatever its name says" * 400, b"SQLite format 3\0"])
def test_a_file_that_is_no_spool_is_set_aside_and_a_new_one_begun(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    leave(path, make_step(uid="a"))
    assert path.with_name("gateway.spool.damaged-0").read_bytes() == content
    assert f"spool {path} is damaged" in caplog.text
    assert left_in(path) == ["a"]


def test_what_can_be_read_of_a_damaged_spool_is_carried_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(path, *(make_step(uid=str(i)) for i in range(MAX_ROW + 1)))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE messages SET packed = zeroblob(length(packed)) WHERE n = 1")
    db.close()
    assert left_in(path) == [str(MAX_ROW)]
    assert "1 rows are not what was written, or are of another version; 1 steps could be read" in caplog.text
    caplog.clear()
    assert left_in(path) == [str(MAX_ROW)]
    assert caplog.text == ""


def test_a_disk_that_takes_no_more_is_told_and_all_is_written_when_it_does_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Spool(path)) as spool:
        with largest_file(2**19):
            spool.add(held(make_step(uid="large", prompt_ids=range(2**18))))
            wait_until(lambda: spool.unwritten == 1, "the step to be counted")
        spool.add(held(make_step(uid="later")))
    assert "cannot be written, new steps are only in memory: disk I/O error" in caplog.text
    assert left_in(path) == ["large", "later"]


def test_steps_that_cannot_be_packed_do_not_end_the_writing(path: Path) -> None:
    with closing(Spool(path)) as spool:
        spool.add(held(make_step(uid="a", extras={"no": object()}), make_step(uid="b")))
        wait_until(lambda: spool.unwritten == 1, "the step to be counted")
        spool.add(held(make_step(uid="c")))
    assert left_in(path) == ["b", "c"]


async def test_what_the_pool_has_is_no_longer_in_the_spool(path: Path, pool: LocalPool, run_outbox: RunOutbox) -> None:
    with closing(Spool(path)) as spool:
        async with run_outbox(spool) as outbox:
            outbox.record([make_step(uid="a"), make_step("nobody", "p", uid="b")])
            await outbox.settle()
    assert outbox.delivered == {"accepted": 1}
    assert left_in(path) == []


async def test_what_an_earlier_process_left_is_delivered_first(
    path: Path, pool: LocalPool, run_outbox: RunOutbox
) -> None:
    leave(path, make_step(uid="old"), make_step(uid="older twin"))
    pool.rules.submit([make_step(uid="older twin")])
    with closing(Spool(path)) as spool:
        async with run_outbox(spool) as outbox:
            outbox.record([make_step(uid="new")])
            await outbox.settle("t")
    assert outbox.delivered == {"accepted": 2, "duplicate": 1}
    pool.rules.complete("t", "p")
    assert [step.uid for step in pool.taken()] == ["older twin", "old", "new"]
    assert left_in(path) == []


async def test_what_the_pool_did_not_take_before_the_end_is_not_lost(
    path: Path, pool: LocalPool, run_outbox: RunOutbox
) -> None:
    pool.away = True
    with closing(Spool(path)) as spool:
        async with run_outbox(spool, confirm_timeout=0.02) as outbox:
            outbox.record([make_step(uid="a")])
            with pytest.raises(PoolUnavailable):
                await outbox.record_durably([make_step(uid="b")])
            await outbox.drain(0.02)
    assert outbox.lost.total() == 0
    assert left_in(path) == ["a", "b"]


async def test_what_is_given_up_leaves_the_file_too_so_that_it_stays_small(
    path: Path, pool: LocalPool, run_outbox: RunOutbox
) -> None:
    bound = 4 * 2**20
    pool.away = True
    with closing(Spool(path, max_bytes=bound)) as spool:
        async with run_outbox(spool, max_held_bytes=bound) as outbox:
            for i in range(400):
                outbox.record([make_step(uid=str(i), prompt_ids=range(25_000))])
                await asyncio.sleep(0.0005)
            await until(lambda: outbox.lost["spool_full"] > 200, "the oldest to be given up")
    assert file_size(path) < 5 * bound
    kept = left_in(path)
    assert kept[-1] == "399"
    assert "0" not in kept
