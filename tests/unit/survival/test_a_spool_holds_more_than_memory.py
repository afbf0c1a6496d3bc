"""D14: the spool had the same bound as memory, so its disk did not help: 80 s of a pool that is away lost steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.spool import Spool
from stepwell.gateway.recording.step_book import HeldStep
from stepwell.pool.api.producing import Registration

IN_MEMORY, STEPS = 10, 300


@pytest.fixture
def pool() -> LocalPool:
    pool = LocalPool()
    pool.rules.register(Registration("t", "p"))
    return pool


@asynccontextmanager
async def sending(pool: LocalPool, spool: Spool) -> AsyncIterator[Outbox]:
    outbox = Outbox(pool, on_refused=lambda _: None, spool=spool, max_held=IN_MEMORY, retry_pause=0.001)
    task = asyncio.create_task(outbox.run())
    yield outbox
    task.cancel()


def delivered(pool: LocalPool) -> int:
    return pool.rules.stats().channels["train"].held.steps


async def test_steps_beyond_the_memory_bound_wait_on_disk_and_are_delivered(tmp_path: Path, pool: LocalPool) -> None:
    pool.away = True
    with closing(Spool(tmp_path / "spool")) as spool:
        async with sending(pool, spool) as outbox:
            for number in range(STEPS):
                outbox.record([make_step(uid=str(number), prompt_ids=range(1000))])
            assert (outbox.waiting, outbox.lost.total()) == (STEPS, 0)
            assert outbox.waiting_bytes < 2 * IN_MEMORY * 5200, "the bytes in memory"
            pool.away = False
            await outbox.settle("t")
        assert (delivered(pool), outbox.waiting, outbox.lost.total()) == (STEPS, 0, 0)
    with closing(Spool(tmp_path / "spool")) as spool:
        assert spool.take_leftovers() == []


async def test_steps_beyond_the_bound_of_the_disk_are_given_up_and_counted(tmp_path: Path, pool: LocalPool) -> None:
    pool.away = True
    with closing(Spool(tmp_path / "spool", max_bytes=2**20)) as spool:
        async with sending(pool, spool) as outbox:
            for number in range(STEPS):
                outbox.record([make_step(uid=str(number), prompt_ids=range(10_000))])
                await asyncio.sleep(0)
            await until(lambda: outbox.lost["spool_full"] > STEPS // 2, "steps to be given up")
            pool.away = False
            await outbox.settle("t")
        assert delivered(pool) + outbox.lost["spool_full"] == STEPS


async def test_a_restart_reads_what_fits_and_the_rest_later(tmp_path: Path, pool: LocalPool) -> None:
    with closing(Spool(tmp_path / "spool")) as spool:
        for start in range(0, STEPS, 10):
            steps = [make_step(uid=str(number), prompt_ids=range(1000)) for number in range(start, start + 10)]
            spool.add([HeldStep(step.uid, step.trajectory_uid, step) for step in steps])
            await asyncio.sleep(0.006)  # a row for each
    with closing(Spool(tmp_path / "spool", most_found=100_000)) as spool:
        async with sending(pool, spool) as outbox:
            assert outbox.waiting == STEPS
            assert 0 < outbox.waiting_bytes < STEPS // 2 * 4000, "the bytes in memory"
            await outbox.settle("t")
    assert delivered(pool) == STEPS
