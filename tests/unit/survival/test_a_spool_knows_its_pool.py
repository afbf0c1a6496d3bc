"""D5: steps in the spool of another pool were refused as unknown, and deleted from the spool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.api.producing import Registration

LEFT = 100


def made_pool(uid: str) -> LocalPool:
    pool = LocalPool(uid=uid)
    pool.rules.register(Registration("t", "p"))
    return pool


@asynccontextmanager
async def sending(pool: LocalPool, spool: Spool, **options: Any) -> AsyncIterator[Outbox]:
    outbox = Outbox(pool, on_refused=lambda _: None, spool=spool, retry_pause=0.001, **options)
    task = asyncio.create_task(outbox.run())
    yield outbox
    task.cancel()


def held(pool: LocalPool) -> int:
    channel = pool.rules.stats().channels.get("train")
    return 0 if channel is None else channel.held.steps


async def leave_steps(path: Path, uid: str) -> None:
    """What a gateway of that pool leaves when it is killed while the pool is away."""
    pool = made_pool(uid)
    with closing(Spool(path)) as spool:
        async with sending(pool, spool) as outbox:
            outbox.record([make_step(uid="first")])
            await outbox.settle()
            pool.away = True
            outbox.record([make_step(uid=str(n)) for n in range(LEFT)])


@pytest.mark.parametrize("options", [{}, {"max_held": 10}], ids=["in memory", "on disk"])
async def test_steps_of_another_pool_are_set_apart_and_delivered_to_their_own(
    tmp_path: Path, options: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    await leave_steps(tmp_path / "spool", "old")
    new = made_pool("new")
    with closing(Spool(tmp_path / "spool", most_found=2**12 if options else 2**20)) as spool:
        async with sending(new, spool, **options) as outbox:
            outbox.record([make_step(uid="another")])
            await outbox.settle("t")
            assert (held(new), outbox.waiting, outbox.lost) == (1, 0, {"other_pool": LEFT})
            await until(lambda: "set apart" in caplog.text, "the operator to be told")
    assert f"--spool {tmp_path / 'spool'}.old" in caplog.text
    with closing(Spool(tmp_path / "spool")) as spool:
        assert spool.take_leftovers() == []
        assert spool.claim("new")
    old = made_pool("old")
    with closing(Spool(tmp_path / "spool.old")) as spool:
        async with sending(old, spool) as outbox:
            await outbox.settle("t")
            assert (held(old), outbox.lost.total()) == (LEFT, 0)


async def test_steps_of_the_same_pool_are_delivered(tmp_path: Path) -> None:
    await leave_steps(tmp_path / "spool", "same")
    pool = made_pool("same")
    with closing(Spool(tmp_path / "spool")) as spool:
        async with sending(pool, spool) as outbox:
            await outbox.settle("t")
            assert (held(pool), outbox.lost.total()) == (LEFT, 0)


async def test_a_spool_that_names_no_pool_is_delivered(tmp_path: Path) -> None:
    await leave_steps(tmp_path / "spool", "")
    pool = made_pool("new")
    with closing(Spool(tmp_path / "spool")) as spool:
        async with sending(pool, spool) as outbox:
            await outbox.settle("t")
            assert (held(pool), outbox.lost.total()) == (LEFT, 0)
