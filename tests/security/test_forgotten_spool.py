"""A gateway's spool has nothing of a forgotten subject: neither what it held nor what it had delivered before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import numpy as np
import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.api.producing import SCRUB_SPOOL
from stepwell.pool.api.sessions import SessionCall, session_prompt_uid
from stepwell.steps.step import Step

ALICE = "alice@example.org"
SECRET = "the-queen-of-hearts"
TOKENS = list(range(8_000_100, 8_000_200))


def said(uid: str) -> Step:
    return make_step("chat", session_prompt_uid("chat"), uid=uid, prompt_ids=TOKENS, extras={"text": SECRET})


async def pool_with_session() -> LocalPool:
    pool = LocalPool(uid="pool")
    await pool.place_session(SessionCall("chat", "new", ALICE))
    return pool


@asynccontextmanager
async def sending(pool: LocalPool, path: Path) -> AsyncIterator[Outbox]:
    with closing(Spool(path)) as spool:
        outbox = Outbox(pool, on_refused=lambda _: None, spool=spool, retry_pause=0.001)
        task = asyncio.create_task(outbox.run())
        try:
            yield outbox
        finally:
            task.cancel()


async def hold_on_disk(pool: LocalPool, outbox: Outbox, folder: Path) -> None:
    """A step in the spool that waits for the pool."""
    pool.away = True
    outbox.record([said("held")])
    await until(lambda: has_traces(folder), "the step to be on disk")


def has_traces(folder: Path) -> bool:
    contents = [file.read_bytes() for file in folder.iterdir()]
    needles = (SECRET.encode(), np.array(TOKENS[5:9], np.int32).tobytes())
    return any(needle in content for content in contents for needle in needles)


async def test_a_step_that_waits_for_the_pool_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    pool = await pool_with_session()
    async with sending(pool, tmp_path / "spool") as outbox:
        await hold_on_disk(pool, outbox, tmp_path)
        pool.away = False
        await pool.forget(ALICE)
        await until(lambda: not has_traces(tmp_path), "the spool to be clean")
        assert outbox.waiting == 0
        assert outbox.lost["forgotten"] + outbox.delivered["accepted"] == 1


async def test_what_was_delivered_before_leaves_no_trace_when_the_pool_asks(tmp_path: Path) -> None:
    """The pool asks every living gateway, and its receipt names those that have done it."""
    pool = await pool_with_session()
    async with sending(pool, tmp_path / "spool") as outbox:
        await hold_on_disk(pool, outbox, tmp_path)
        pool.away = False
        await outbox.settle()
        assert has_traces(tmp_path), "a deleted row is still in the file"
        asked: list[str] = []

        async def flush(trajectory_uid: str) -> None:
            asked.append(trajectory_uid)
            await outbox.scrub()

        gateway = asyncio.create_task(pool.follow_flushes(flush))
        shard = pool.transport.services[pool.plan.name]
        await until(lambda: len(shard.pool.state.gateways) == 1, "the gateway to be known")
        (removed,) = (await pool.forget(ALICE))["shards"].values()
        gateway.cancel()
        assert asked == [SCRUB_SPOOL]
        assert removed["gateways"] == list(shard.pool.state.gateways)
        assert removed["silent_gateways"] == []
        assert not has_traces(tmp_path)


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_the_spool_of_a_dead_gateway_is_clean_soon_after_its_start(tmp_path: Path, is_delivered: bool) -> None:
    pool = await pool_with_session()
    async with sending(pool, tmp_path / "spool") as outbox:
        await hold_on_disk(pool, outbox, tmp_path)
        if is_delivered:
            pool.away = False
            await outbox.settle()
    pool.away = False
    await pool.forget(ALICE)
    assert has_traces(tmp_path) is not is_delivered or is_delivered
    async with sending(pool, tmp_path / "spool"):
        await until(lambda: not has_traces(tmp_path), "the spool to be clean")
