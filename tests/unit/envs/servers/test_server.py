import asyncio
import contextlib

from stepwell.envs.servers.server import CallSlots


class Crowd:
    """Calls that hold a slot until they are let go."""

    def __init__(self, slots: CallSlots) -> None:
        self.slots = slots
        self.inside: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._go: dict[int, asyncio.Event] = {}

    async def come(self, count: int) -> None:
        for number in range(len(self.tasks), len(self.tasks) + count):
            self._go[number] = asyncio.Event()
            self.tasks.append(asyncio.create_task(self._call(number)))
        await settled()

    async def end(self, number: int) -> None:
        self._go[number].set()
        await settled()

    async def _call(self, number: int) -> None:
        async with self.slots:
            self.inside.append(number)
            await self._go[number].wait()
            self.inside.remove(number)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_so_many_are_inside_and_the_first_to_come_is_next() -> None:
    crowd = Crowd(CallSlots(2))
    await crowd.come(4)
    assert (crowd.inside, crowd.slots.load) == ([0, 1], 2.0)
    await crowd.end(1)
    assert crowd.inside == [0, 2]
    for number in (0, 2, 3):
        await crowd.end(number)
    assert (crowd.inside, crowd.slots.load) == ([], 0.0)


async def test_a_raised_bound_lets_those_in_who_wait_and_a_lowered_one_sends_no_one_away() -> None:
    crowd = Crowd(CallSlots(1))
    await crowd.come(4)
    crowd.slots.resize(3)
    await settled()
    assert crowd.inside == [0, 1, 2]
    crowd.slots.resize(0)
    await crowd.end(0)
    await crowd.end(1)
    assert crowd.inside == [2]
    await crowd.end(2)
    assert crowd.inside == [3]
    await crowd.end(3)


async def test_who_leaves_while_waiting_takes_no_slot_along() -> None:
    crowd = Crowd(CallSlots(1))
    await crowd.come(3)
    crowd.tasks[1].cancel()
    await crowd.end(0)
    assert crowd.inside == [2]
    await crowd.end(2)
    assert crowd.slots.load == 0


async def test_who_is_admitted_and_told_to_leave_at_once_gives_the_slot_on() -> None:
    slots = CallSlots(1)
    crowd = Crowd(slots)
    await crowd.come(3)
    crowd._go[0].set()
    await asyncio.sleep(0)  # 0 leaves and admits 1, which has not run yet
    crowd.tasks[1].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await crowd.tasks[1]
    await settled()
    assert crowd.inside == [2]
    await crowd.end(2)
    assert slots.load == 0
