"""A gateway gives its word that the pool knows of its answers only if that is so."""

import asyncio

import pytest
from stepwell.gateway.recording.call_book import LATE, CallBook

from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.pool.api.producing import CallBegun, Registration

CALL = CallBegun("t", "p", "step")


@pytest.fixture
async def pool() -> LocalPool:
    pool = LocalPool()
    await pool.register_trajectory(Registration("t", "p"))
    return pool


async def test_a_call_that_the_pool_knows_is_no_reason_for_doubt(pool: LocalPool) -> None:
    book = CallBook(pool)
    book.begin(CALL)
    await book.announced("step")
    held = book.held()
    assert [call.uid for call in held.calls] == ["step"]
    assert (held.missed, held.is_late) == (0, False)


async def test_while_an_answer_waits_for_long_the_gateway_does_not_give_its_word(pool: LocalPool) -> None:
    book = CallBook(pool, announce_wait=30.0)
    pool.transport.shards_stopped.add(pool.plan.name)
    book.begin(CALL)
    assert not book.held().is_late, "no answer waits yet"
    answering = asyncio.create_task(book.announced("step"))
    await until(lambda: book.held().is_late, f"the answer to wait for {LATE} s")
    pool.transport.shards_stopped.clear()
    await answering
    held = book.held()
    assert (held.missed, held.is_late) == (0, False)


async def test_an_answer_that_the_pool_did_not_know_is_missed_and_the_next_ones_may_not_wait(pool: LocalPool) -> None:
    book = CallBook(pool, announce_wait=0.01)
    pool.transport.shards_stopped.add(pool.plan.name)
    book.begin(CALL)
    await book.announced("step")
    held = book.held()
    assert (held.missed, held.is_late) == (1, True)
    pool.transport.shards_stopped.clear()
    await until(lambda: not book.held().is_late, "the announcement to arrive")
    assert book.held().missed == 1, "the pool has to be told"


async def test_the_end_of_a_call_that_the_pool_does_not_hear_is_missed(pool: LocalPool) -> None:
    book = CallBook(pool)
    book.begin(CALL)
    await book.announced("step")
    pool.away = True
    book.answered("step")
    await until(lambda: book.held().missed == 1, "the end to be told in vain")
    assert not book.held().is_late
