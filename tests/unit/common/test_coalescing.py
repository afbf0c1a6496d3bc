import asyncio

import pytest

from stepwell.common.coalescing import SharedAnswer
from stepwell.errors import PoolUnavailable
from tests.rig.waiting import until


class Pool:
    def __init__(self) -> None:
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def stats(self) -> int:
        self.asked += 1
        await self.answers.wait()
        return self.asked


async def test_all_who_ask_at_once_share_one_question() -> None:
    pool = Pool()
    shared = SharedAnswer(pool.stats)
    assert await asyncio.gather(*(shared.get() for _ in range(5))) == [1] * 5
    assert await shared.get() == 1


async def test_who_wants_it_fresh_gets_what_was_asked_for_afterwards() -> None:
    pool = Pool()
    shared = SharedAnswer(pool.stats)
    assert await shared.get() == 1
    assert await shared.get(fresh=True) == 2
    assert await shared.get() == 2
    pool.answers.clear()
    under_way = asyncio.create_task(shared.get(fresh=True))
    await until(lambda: pool.asked == 3, "a question under way")
    later = [asyncio.create_task(shared.get(fresh=True)) for _ in range(3)]
    await asyncio.sleep(0)
    pool.answers.set()
    assert [await under_way, *[await one for one in later]] == [3, 4, 4, 4]


async def test_a_pool_that_does_not_answer_is_told_soon_and_asked_no_second_time() -> None:
    pool = Pool()
    pool.answers.clear()
    shared = SharedAnswer(pool.stats, timeout=0.05)
    for _ in range(3):
        with pytest.raises(PoolUnavailable, match="has not answered"):
            await shared.get()
    assert pool.asked == 1
    pool.answers.set()
    assert await shared.get() == 1


async def test_a_question_that_is_under_way_ends_with_the_dashboard() -> None:
    pool = Pool()
    pool.answers.clear()
    shared = SharedAnswer(pool.stats, timeout=0.05)
    with pytest.raises(PoolUnavailable):
        await shared.get()
    await shared.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
