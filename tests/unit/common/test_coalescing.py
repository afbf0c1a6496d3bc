import asyncio

import pytest

from rig.complaints import Complaints
from rig.waiting import until
from stepwell.common.async_calls import BatchSender, Coalescer, SharedAnswer
from stepwell.errors import Conflict, PoolUnavailable


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


async def test_nothing_is_printed_of_a_question_that_fails_when_nobody_waits_for_it() -> None:
    complaints, may_fail = Complaints(), asyncio.Event()

    async def fail() -> int:
        await may_fail.wait()
        raise PoolUnavailable("it is away")

    shared = SharedAnswer(fail, timeout=0.05)
    with pytest.raises(PoolUnavailable, match="has not answered"):
        await shared.get()
    may_fail.set()
    del shared
    assert await complaints.when_all_has_ended() == []


async def test_a_question_that_is_under_way_ends_with_the_dashboard() -> None:
    pool = Pool()
    pool.answers.clear()
    shared = SharedAnswer(pool.stats, timeout=0.05)
    with pytest.raises(PoolUnavailable):
        await shared.get()
    await shared.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


class Receiver:
    """Answers each item with itself when it may; an item that is an exception is refused."""

    def __init__(self) -> None:
        self.messages: list[list[int | Exception]] = []
        self.may_answer = asyncio.Event()
        self.failure: Exception | None = None

    async def receive(self, items: list[int | Exception]) -> list[int | Exception]:
        self.messages.append(items)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return items


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def sender(receiver: Receiver) -> BatchSender[int | Exception, int]:
    return BatchSender(receiver.receive)


async def test_items_that_come_while_a_message_is_under_way_share_the_next(
    receiver: Receiver, sender: BatchSender[int | Exception, int]
) -> None:
    first = asyncio.create_task(sender.submit(1))
    await until(lambda: receiver.messages == [[1]], "the first message")
    others = [asyncio.create_task(sender.submit(n)) for n in (2, 3, 4)]
    await asyncio.sleep(0)
    receiver.may_answer.set()
    assert await asyncio.gather(first, *others) == [1, 2, 3, 4]
    assert receiver.messages == [[1], [2, 3, 4]]


async def test_an_item_that_is_refused_is_refused_alone(
    receiver: Receiver, sender: BatchSender[int | Exception, int]
) -> None:
    receiver.may_answer.set()
    submitted = [sender.submit(item) for item in (1, Conflict("no"), 3)]
    one, refused, three = await asyncio.gather(*submitted, return_exceptions=True)
    assert (one, three) == (1, 3)
    assert isinstance(refused, Conflict)
    assert len(receiver.messages) == 1


async def test_all_items_of_a_message_get_its_failure_and_the_next_message_is_sent(
    receiver: Receiver, sender: BatchSender[int | Exception, int]
) -> None:
    receiver.failure = PoolUnavailable("away")
    receiver.may_answer.set()
    answers = await asyncio.gather(*(sender.submit(n) for n in (1, 2)), return_exceptions=True)
    assert [str(failure) for failure in answers] == ["away", "away"]
    receiver.failure = None
    assert await sender.submit(3) == 3


@pytest.mark.parametrize("sends_cancelled", [False, True])
async def test_a_caller_that_is_cancelled_takes_its_item_back_unless_told_otherwise(
    receiver: Receiver, sends_cancelled: bool
) -> None:
    sender: BatchSender[int | Exception, int] = BatchSender(receiver.receive, sends_cancelled=sends_cancelled)
    first = asyncio.create_task(sender.submit(1))
    await until(lambda: bool(receiver.messages), "the first message")
    leaving, staying = (asyncio.create_task(sender.submit(n)) for n in (2, 3))
    await asyncio.sleep(0)
    leaving.cancel()
    receiver.may_answer.set()
    assert [await first, await staying] == [1, 3]
    assert leaving.cancelled()
    assert receiver.messages == [[1], [2, 3] if sends_cancelled else [3]]


async def test_a_message_is_no_heavier_than_allowed_unless_a_single_item_is(receiver: Receiver) -> None:
    sender: BatchSender[int | Exception, int] = BatchSender(receiver.receive, weigh=int, max_weight=5)  # type: ignore[arg-type]
    receiver.may_answer.set()
    await asyncio.gather(*(sender.submit(n) for n in (2, 3, 1, 9, 1)))
    assert receiver.messages == [[2, 3], [1], [9], [1]]


async def test_callers_of_a_coalesced_call_share_the_next_one() -> None:
    calls, may_end = 0, asyncio.Event()

    async def call() -> None:
        nonlocal calls
        calls += 1
        await may_end.wait()

    coalescer = Coalescer(call)
    first = asyncio.create_task(coalescer.fresh())
    await until(lambda: calls == 1, "the first call")
    others = [asyncio.create_task(coalescer.fresh()) for _ in range(3)]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, *others)
    assert calls == 2


async def test_closing_a_coalescer_releases_those_who_wait() -> None:
    coalescer = Coalescer(asyncio.Event().wait)  # type: ignore[arg-type]
    waiting = asyncio.create_task(coalescer.fresh())
    await asyncio.sleep(0)
    coalescer.close()
    await asyncio.wait_for(waiting, 5)
