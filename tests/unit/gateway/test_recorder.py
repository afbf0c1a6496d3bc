import asyncio
from collections.abc import AsyncIterator

import pytest

from stepwell.core.intake import Registration
from stepwell.core.limits import Limits, Overflow
from stepwell.errors import PoolUnavailable
from stepwell.gateway import recorder as module
from stepwell.gateway.recorder import Recorder
from tests.builders import EasyPool, make_step
from tests.rig.memory_pool import MemoryPool


@pytest.fixture
def pool() -> MemoryPool:
    pool = MemoryPool()
    pool.rules.register(Registration("t", "p"))
    return pool


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
async def recorder(pool: MemoryPool, forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Recorder]:
    monkeypatch.setattr(module, "RETRY_PAUSE", 0.001)
    recorder = Recorder(pool, on_refused=forgotten.append)
    running = asyncio.create_task(recorder.run())
    yield recorder
    running.cancel()


async def test_what_is_recorded_reaches_the_pool(recorder: Recorder, pool: MemoryPool) -> None:
    await recorder.record([make_step(uid="a"), make_step(uid="b")])
    await recorder.settle()
    pool.rules.complete("t", "p")
    assert [step.uid for step in pool.taken()] == ["a", "b"]
    assert recorder.lost.total() == 0


async def test_steps_that_come_while_a_message_is_under_way_travel_together(
    recorder: Recorder, pool: MemoryPool
) -> None:
    for i in range(1000):
        await recorder.record([make_step(uid=str(i))])
    await recorder.settle()
    assert sum(pool.messages) == 1000
    assert len(pool.messages) < 50
    assert max(pool.messages) <= module.MAX_MESSAGE


async def test_a_step_waits_for_a_pool_that_is_away(recorder: Recorder, pool: MemoryPool) -> None:
    pool.away = True
    await recorder.record([make_step(uid="a")])
    with pytest.raises(PoolUnavailable, match="1 steps still wait for the pool after 0.05 s"):
        await recorder.settle(0.05)
    pool.away = False
    await recorder.settle()
    pool.rules.complete("t", "p")
    assert [step.uid for step in pool.taken()] == ["a"]


async def test_a_lost_answer_does_not_double_a_step(recorder: Recorder, pool: MemoryPool) -> None:
    pool.loses_answers = 2
    await recorder.record([make_step(uid="a")])
    await recorder.settle()
    assert len(pool.messages) == 3
    pool.rules.complete("t", "p")
    assert [step.uid for step in pool.taken()] == ["a"]
    assert recorder.lost.total() == 0


async def test_a_refused_step_is_counted_and_its_trajectory_forgotten(recorder: Recorder, forgotten: list[str]) -> None:
    await recorder.record([make_step("nobody", "p")])
    await recorder.settle()
    assert recorder.lost == {"unknown": 1}
    assert forgotten == ["nobody"]


async def test_beyond_its_bound_the_oldest_step_is_given_up_and_counted(
    recorder: Recorder, pool: MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 3)
    pool.away = True
    await recorder.record([make_step(uid=str(i)) for i in range(5)])
    pool.away = False
    await recorder.settle()
    pool.rules.complete("t", "p")
    assert [step.uid for step in pool.taken()] == ["2", "3", "4"]
    assert recorder.lost == {"recorder_full": 2}


async def test_a_step_waits_for_a_full_pool_to_have_room(recorder: Recorder, pool: MemoryPool) -> None:
    pool.rules = EasyPool(Limits(max_bytes=150, overflow=Overflow.REFUSE))
    pool.rules.rollout("first", "q", prompt_ids=range(20))
    pool.rules.register(Registration("t", "p"))
    await recorder.record([make_step(uid="a", prompt_ids=range(20))])
    with pytest.raises(PoolUnavailable, match="1 steps still wait"):
        await recorder.settle(0.05)
    assert pool.rules.take(1) is not None
    await recorder.settle()
    assert pool.rules.stats().channels["train"].held.steps == 1


async def test_what_cannot_be_delivered_at_the_end_is_counted(recorder: Recorder, pool: MemoryPool) -> None:
    pool.away = True
    await recorder.record([make_step()])
    await recorder.drain(0.05)
    assert recorder.lost == {"shutdown": 1}
