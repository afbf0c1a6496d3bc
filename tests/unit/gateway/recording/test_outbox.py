import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.errors import Conflict, PoolUnavailable, UnknownTrajectory
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.recording.step_book import MAX_MESSAGE, step_bytes
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.producing import Registration
from stepwell.pool.state.records import A_GROUP, A_PACKED_STEP, A_STEP, A_TRAJECTORY

MAX_BYTES = 2**21


FILLING = 4
ROOM = (FILLING + 1) * (A_GROUP + A_TRAJECTORY) + (FILLING - 1) * A_PACKED_STEP + A_STEP + 440
TINY = pytest.mark.parametrize("limits", [{"max_bytes": ROOM, "overflow": Overflow.REFUSE}])
"""A pool that FILLING rollouts fill."""


def fill(pool: LocalPool) -> None:
    for number in range(FILLING):
        pool.rules.rollout(f"first-{number}", f"q{number}", prompt_ids=range(20))


@pytest.fixture
def limits() -> dict[str, Any]:
    return {}


@pytest.fixture
def pool(limits: dict[str, Any]) -> LocalPool:
    pool = LocalPool(**limits)
    pool.rules.register(Registration("t", "p"))
    return pool


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
async def outbox(pool: LocalPool, forgotten: list[str]) -> AsyncIterator[Outbox]:
    async with running(pool, on_refused=forgotten.append, max_held=1000, max_held_bytes=MAX_BYTES) as outbox:
        yield outbox


@asynccontextmanager
async def running(pool: LocalPool, **options: Any) -> AsyncIterator[Outbox]:
    outbox = Outbox(pool, **{"on_refused": lambda _: None, "retry_pause": 0.001, **options})
    task = asyncio.create_task(outbox.run())
    yield outbox
    task.cancel()


def uids_taken(pool: LocalPool) -> list[str]:
    pool.rules.complete("t", "p")
    return [step.uid for step in pool.taken()]


async def test_what_is_recorded_reaches_the_pool(outbox: Outbox, pool: LocalPool) -> None:
    outbox.record([make_step(uid="a"), make_step(uid="b")])
    assert outbox.waiting == 2
    await outbox.settle()
    assert uids_taken(pool) == ["a", "b"]
    assert outbox.delivered == {"accepted": 2}
    assert outbox.lost.total() == 0
    assert (outbox.waiting, outbox.waiting_bytes) == (0, 0)


async def test_steps_that_come_within_some_milliseconds_travel_together(outbox: Outbox, pool: LocalPool) -> None:
    for i in range(10):
        outbox.record([make_step(uid=str(i))])
        await asyncio.sleep(0)
    await until(lambda: not outbox.waiting, "the steps to be delivered")
    assert pool.transport.messages == [10]


async def test_a_message_has_a_bound(outbox: Outbox, pool: LocalPool) -> None:
    for i in range(900):
        outbox.record([make_step(uid=str(i))])
    await outbox.settle()
    assert pool.transport.messages == [MAX_MESSAGE, MAX_MESSAGE, MAX_MESSAGE, 900 - 3 * MAX_MESSAGE]


async def test_whoever_settles_does_not_wait_for_company(pool: LocalPool) -> None:
    async with running(pool, gather_seconds=3600.0) as outbox, asyncio.timeout(60):
        outbox.record([make_step(uid="a")])
        await outbox.settle("t")
    assert pool.transport.messages == [1]


async def test_a_step_waits_for_a_pool_that_is_away(outbox: Outbox, pool: LocalPool) -> None:
    pool.away = True
    outbox.record([make_step(uid="a")])
    with pytest.raises(PoolUnavailable, match="1 steps still wait for the pool after 0.05 s"):
        await outbox.settle(timeout=0.05)
    pool.away = False
    await outbox.settle()
    assert uids_taken(pool) == ["a"]


async def test_a_pool_that_fails_in_an_unforeseen_way_is_tried_again(
    outbox: Outbox, pool: LocalPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("no space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(pool, "submit_steps", fail)
        outbox.record([make_step(uid="a")])
        await until(lambda: "no space left" in caplog.text, "the failure in the log")
    await outbox.settle()
    assert uids_taken(pool) == ["a"]


@TINY
async def test_a_trajectory_settles_without_waiting_for_another(outbox: Outbox, pool: LocalPool) -> None:
    fill(pool)
    pool.rules.register(Registration("full", "p"))
    pool.rules.register(Registration("other", "r", channel="validation"))
    outbox.record([make_step("full", "p", uid="a", prompt_ids=range(20)), make_step("other", "r", uid="b")])
    await outbox.settle("other")
    assert outbox.waiting == 1
    await outbox.settle("a trajectory without steps")
    with pytest.raises(PoolUnavailable):
        await outbox.settle("full", timeout=0.02)


async def test_a_lost_answer_does_not_double_a_step(outbox: Outbox, pool: LocalPool) -> None:
    pool.transport.loses_answers = 2
    outbox.record([make_step(uid="a")])
    await outbox.settle()
    assert len(pool.transport.messages) == 3
    assert uids_taken(pool) == ["a"]
    assert outbox.delivered == {"duplicate": 1}
    assert outbox.lost.total() == 0


async def test_a_refused_step_is_counted_and_its_trajectory_forgotten(outbox: Outbox, forgotten: list[str]) -> None:
    outbox.record([make_step("nobody", "p")])
    await outbox.settle()
    assert outbox.lost == {"unknown": 1}
    assert outbox.delivered.total() == 0
    assert forgotten == ["nobody"]


async def test_beyond_its_bound_the_oldest_step_is_given_up_and_counted(outbox: Outbox, pool: LocalPool) -> None:
    pool.away = True
    outbox.record([make_step(uid=str(i)) for i in range(1002)])
    assert outbox.waiting == 1000
    pool.away = False
    await outbox.settle()
    assert uids_taken(pool) == [str(i) for i in range(2, 1002)]
    assert outbox.lost == {"recorder_full": 2}


async def test_the_bound_in_bytes_is_kept_while_the_pool_is_away(outbox: Outbox, pool: LocalPool) -> None:
    pool.away = True
    steps = [make_step(uid=str(i), prompt_ids=range(20_000)) for i in range(40)]
    for step in steps:
        outbox.record([step])
        assert outbox.waiting_bytes <= MAX_BYTES
    kept = MAX_BYTES // step_bytes(steps[0])
    assert outbox.waiting == kept
    assert outbox.lost == {"recorder_full": 40 - kept}
    pool.away = False
    await outbox.settle()
    assert uids_taken(pool) == [str(i) for i in range(40 - kept, 40)]
    assert outbox.waiting_bytes == 0


async def test_what_is_given_up_is_told_in_a_few_lines_with_the_number(
    outbox: Outbox, pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.away = True
    for i in range(1500):
        outbox.record([make_step(uid=str(i))])
    await outbox.drain(0.01)
    told = [line.getMessage() for line in caplog.records if "given up" in line.getMessage()]
    assert told == [f"{n} steps were given up, the oldest of those held; 1000 are waiting" for n in (1, 499)]


@TINY
async def test_a_step_waits_for_a_full_pool_to_have_room(outbox: Outbox, pool: LocalPool) -> None:
    fill(pool)
    outbox.record([make_step(uid="a", prompt_ids=range(20))])
    with pytest.raises(PoolUnavailable, match="1 steps still wait"):
        await outbox.settle(timeout=0.05)
    assert pool.rules.take(FILLING) is not None
    await outbox.settle()
    assert pool.rules.stats().channels["train"].held.steps == 1


async def test_what_cannot_be_delivered_at_the_end_is_counted(outbox: Outbox, pool: LocalPool) -> None:
    pool.away = True
    outbox.record([make_step()])
    await outbox.drain(0.05)
    assert outbox.lost == {"shutdown": 1}


async def test_recorded_durably_means_that_the_pool_has_it(outbox: Outbox, pool: LocalPool) -> None:
    await outbox.record_durably([make_step(uid="a"), make_step(uid="b", quarantine="miscount: 2 are not 3")])
    assert pool.rules.stats().channels["train"].accepted.steps == 1
    assert outbox.delivered == {"accepted": 1, "quarantined": 1}


async def test_a_lost_answer_does_not_keep_a_durable_step_from_its_confirmation(
    outbox: Outbox, pool: LocalPool
) -> None:
    pool.transport.loses_answers = 1
    await outbox.record_durably([make_step(uid="a")])
    assert uids_taken(pool) == ["a"]


async def test_a_durable_step_that_takes_too_long_says_so_and_is_delivered_later(pool: LocalPool) -> None:
    pool.away = True
    late = "not confirmed this call within 0.05 s; it is kept and will be deliver"
    async with running(pool, confirm_timeout=0.05) as outbox:
        with pytest.raises(PoolUnavailable, match=late):
            await outbox.record_durably([make_step(uid="a")])
        pool.away = False
        await outbox.settle()
    assert uids_taken(pool) == ["a"]


async def test_a_durable_step_that_the_pool_refuses_says_why(outbox: Outbox, pool: LocalPool) -> None:
    with pytest.raises(UnknownTrajectory, match="no trajectory nobody of prompt_uid p"):
        await outbox.record_durably([make_step("nobody", "p")])
    pool.rules.rollout("shipped", "q")
    assert pool.rules.take(1) is not None
    with pytest.raises(Conflict, match="refused this call's step as late"):
        await outbox.record_durably([make_step("shipped", "q", uid="new")])


async def test_a_durable_step_that_is_given_up_says_so(outbox: Outbox, pool: LocalPool) -> None:
    pool.away = True
    asking = asyncio.create_task(outbox.record_durably([make_step(uid="a")]))
    await until(lambda: outbox.waiting == 1, "the step to be held")
    while not asking.done():
        outbox.record([make_step(uid=str(i)) for i in range(1000)])
        await asyncio.sleep(0)
    with pytest.raises(PoolUnavailable, match="given up: too many steps"):
        await asking


async def test_recording_costs_an_agent_microseconds(pool: LocalPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    outbox = Outbox(pool, on_refused=lambda _: None)
    steps = [make_step(str(i), uid=str(i)) for i in range(5000)]
    began = time.thread_time()
    for step in steps:
        outbox.record([step])
    assert (time.thread_time() - began) / len(steps) < 50e-6
