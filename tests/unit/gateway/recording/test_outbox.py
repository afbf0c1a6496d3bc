import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stepwell.errors import Conflict, PoolUnavailable, UnknownTrajectory
from stepwell.gateway.recording import outbox as module
from stepwell.gateway.recording.backlog import MAX_MESSAGE, weight
from stepwell.gateway.recording.outbox import Outbox
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.producing import Registration
from tests.builders import make_step
from tests.rig.local_pool import LocalPool
from tests.rig.waiting import until

MAX_BYTES = 2**21


TINY = pytest.mark.parametrize("limits", [{"max_bytes": 150, "overflow": Overflow.REFUSE}])
"""A pool that one rollout fills."""


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
async def recorder(pool: LocalPool, forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Outbox]:
    monkeypatch.setattr(module, "RETRY_PAUSE", 0.001)
    recorder = Outbox(pool, on_refused=forgotten.append, max_held=1000, max_held_bytes=MAX_BYTES)
    running = asyncio.create_task(recorder.run())
    yield recorder
    running.cancel()


def uids_taken(pool: LocalPool) -> list[str]:
    pool.rules.complete("t", "p")
    return [step.uid for step in pool.taken()]


async def test_what_is_recorded_reaches_the_pool(recorder: Outbox, pool: LocalPool) -> None:
    recorder.record([make_step(uid="a"), make_step(uid="b")])
    assert recorder.waiting == 2
    await recorder.settle()
    assert uids_taken(pool) == ["a", "b"]
    assert recorder.delivered == {"accepted": 2}
    assert recorder.lost.total() == 0
    assert (recorder.waiting, recorder.waiting_bytes) == (0, 0)


async def test_steps_that_come_within_some_milliseconds_travel_together(recorder: Outbox, pool: LocalPool) -> None:
    for i in range(10):
        recorder.record([make_step(uid=str(i))])
        await asyncio.sleep(0)
    await until(lambda: not recorder.waiting, "the steps to be delivered")
    assert pool.transport.messages == [10]


async def test_a_message_has_a_bound(recorder: Outbox, pool: LocalPool) -> None:
    for i in range(900):
        recorder.record([make_step(uid=str(i))])
    await recorder.settle()
    assert pool.transport.messages == [MAX_MESSAGE, MAX_MESSAGE, MAX_MESSAGE, 900 - 3 * MAX_MESSAGE]


async def test_whoever_settles_does_not_wait_for_company(
    recorder: Outbox, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHERING", 30.0)
    recorder.record([make_step(uid="a")])
    async with asyncio.timeout(5):
        await recorder.settle("t")
    assert pool.transport.messages == [1]


async def test_a_step_waits_for_a_pool_that_is_away(recorder: Outbox, pool: LocalPool) -> None:
    pool.away = True
    recorder.record([make_step(uid="a")])
    with pytest.raises(PoolUnavailable, match="1 steps still wait for the pool after 0.05 s"):
        await recorder.settle(timeout=0.05)
    pool.away = False
    await recorder.settle()
    assert uids_taken(pool) == ["a"]


async def test_a_pool_that_fails_in_an_unforeseen_way_is_tried_again(
    recorder: Outbox, pool: LocalPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("no space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(pool, "submit_steps", fail)
        recorder.record([make_step(uid="a")])
        await until(lambda: "no space left" in caplog.text, "the failure in the log")
    await recorder.settle()
    assert uids_taken(pool) == ["a"]


@TINY
async def test_a_trajectory_settles_without_waiting_for_another(recorder: Outbox, pool: LocalPool) -> None:
    pool.rules.rollout("first", "q", prompt_ids=range(20))
    pool.rules.register(Registration("full", "p"))
    pool.rules.register(Registration("other", "r", channel="validation"))
    recorder.record([make_step("full", "p", uid="a", prompt_ids=range(20)), make_step("other", "r", uid="b")])
    await recorder.settle("other")
    assert recorder.waiting == 1
    await recorder.settle("a trajectory without steps")
    with pytest.raises(PoolUnavailable):
        await recorder.settle("full", timeout=0.02)


async def test_a_lost_answer_does_not_double_a_step(recorder: Outbox, pool: LocalPool) -> None:
    pool.transport.loses_answers = 2
    recorder.record([make_step(uid="a")])
    await recorder.settle()
    assert len(pool.transport.messages) == 3
    assert uids_taken(pool) == ["a"]
    assert recorder.delivered == {"duplicate": 1}
    assert recorder.lost.total() == 0


async def test_a_refused_step_is_counted_and_its_trajectory_forgotten(recorder: Outbox, forgotten: list[str]) -> None:
    recorder.record([make_step("nobody", "p")])
    await recorder.settle()
    assert recorder.lost == {"unknown": 1}
    assert recorder.delivered.total() == 0
    assert forgotten == ["nobody"]


async def test_beyond_its_bound_the_oldest_step_is_given_up_and_counted(recorder: Outbox, pool: LocalPool) -> None:
    pool.away = True
    recorder.record([make_step(uid=str(i)) for i in range(1002)])
    assert recorder.waiting == 1000
    pool.away = False
    await recorder.settle()
    assert uids_taken(pool) == [str(i) for i in range(2, 1002)]
    assert recorder.lost == {"recorder_full": 2}


async def test_the_bound_in_bytes_is_kept_while_the_pool_is_away(recorder: Outbox, pool: LocalPool) -> None:
    pool.away = True
    steps = [make_step(uid=str(i), prompt_ids=range(20_000)) for i in range(40)]
    for step in steps:
        recorder.record([step])
        assert recorder.waiting_bytes <= MAX_BYTES
    kept = MAX_BYTES // weight(steps[0])
    assert recorder.waiting == kept
    assert recorder.lost == {"recorder_full": 40 - kept}
    pool.away = False
    await recorder.settle()
    assert uids_taken(pool) == [str(i) for i in range(40 - kept, 40)]
    assert recorder.waiting_bytes == 0


async def test_what_is_given_up_is_told_in_a_few_lines_with_the_number(
    recorder: Outbox, pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.away = True
    for i in range(1500):
        recorder.record([make_step(uid=str(i))])
    await recorder.drain(0.01)
    told = [line.getMessage() for line in caplog.records if "given up" in line.getMessage()]
    assert told == [f"{n} steps were given up, the oldest of those held; 1000 are waiting" for n in (1, 499)]


@TINY
async def test_a_step_waits_for_a_full_pool_to_have_room(recorder: Outbox, pool: LocalPool) -> None:
    pool.rules.rollout("first", "q", prompt_ids=range(20))
    recorder.record([make_step(uid="a", prompt_ids=range(20))])
    with pytest.raises(PoolUnavailable, match="1 steps still wait"):
        await recorder.settle(timeout=0.05)
    assert pool.rules.take(1) is not None
    await recorder.settle()
    assert pool.rules.stats().channels["train"].held.steps == 1


async def test_what_cannot_be_delivered_at_the_end_is_counted(recorder: Outbox, pool: LocalPool) -> None:
    pool.away = True
    recorder.record([make_step()])
    await recorder.drain(0.05)
    assert recorder.lost == {"shutdown": 1}


async def test_recorded_durably_means_that_the_pool_has_it(recorder: Outbox, pool: LocalPool) -> None:
    await recorder.record_durably([make_step(uid="a"), make_step(uid="b", quarantine="miscount: 2 are not 3")])
    assert pool.rules.stats().channels["train"].accepted.steps == 1
    assert recorder.delivered == {"accepted": 1, "quarantined": 1}


async def test_a_lost_answer_does_not_keep_a_durable_step_from_its_confirmation(
    recorder: Outbox, pool: LocalPool
) -> None:
    pool.transport.loses_answers = 1
    await recorder.record_durably([make_step(uid="a")])
    assert uids_taken(pool) == ["a"]


async def test_a_durable_step_that_takes_too_long_says_so_and_is_delivered_later(
    recorder: Outbox, pool: LocalPool
) -> None:
    pool.away = True
    with pytest.raises(PoolUnavailable, match="not confirmed this call within 0.05 s; it is kept and will be deliver"):
        await recorder.record_durably([make_step(uid="a")], timeout=0.05)
    pool.away = False
    await recorder.settle()
    assert uids_taken(pool) == ["a"]


async def test_a_durable_step_that_the_pool_refuses_says_why(recorder: Outbox, pool: LocalPool) -> None:
    with pytest.raises(UnknownTrajectory, match="no trajectory nobody of prompt_uid p"):
        await recorder.record_durably([make_step("nobody", "p")])
    pool.rules.rollout("shipped", "q")
    assert pool.rules.take(1) is not None
    with pytest.raises(Conflict, match="refused this call's step as late"):
        await recorder.record_durably([make_step("shipped", "q", uid="new")])


async def test_a_durable_step_that_is_given_up_says_so(recorder: Outbox, pool: LocalPool) -> None:
    pool.away = True
    asking = asyncio.create_task(recorder.record_durably([make_step(uid="a")]))
    await until(lambda: recorder.waiting == 1, "the step to be held")
    while not asking.done():
        recorder.record([make_step(uid=str(i)) for i in range(1000)])
        await asyncio.sleep(0)
    with pytest.raises(PoolUnavailable, match="given up: too many steps"):
        await asking


async def test_recording_costs_an_agent_microseconds(pool: LocalPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    recorder = Outbox(pool, on_refused=lambda _: None)
    steps = [make_step(str(i), uid=str(i)) for i in range(5000)]
    began = time.thread_time()
    for step in steps:
        recorder.record([step])
    assert (time.thread_time() - began) / len(steps) < 50e-6
