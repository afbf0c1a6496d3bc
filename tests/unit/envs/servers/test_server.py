import asyncio

from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers.server import Server


class Crowd:
    """Calls that hold a slot until they are let go."""

    def __init__(self, limit: int) -> None:
        self.server = Server(APIServerConfig(num_max_requests_at_once=limit))
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
        async with self.server.slots["train"]:
            self.inside.append(number)
            await self._go[number].wait()
            self.inside.remove(number)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_so_many_are_inside_and_the_first_to_come_is_next() -> None:
    crowd = Crowd(2)
    await crowd.come(4)
    assert (crowd.inside, crowd.server.load("train"), crowd.server.load("eval")) == ([0, 1], 2.0, 0.0)
    await crowd.end(1)
    assert crowd.inside == [0, 2]
    for number in (0, 2, 3):
        await crowd.end(number)
    assert (crowd.inside, crowd.server.load("train")) == ([], 0.0)


async def test_a_greater_weight_lets_those_in_who_wait_and_a_smaller_one_sends_no_one_away() -> None:
    crowd = Crowd(8)
    crowd.server.update_weight(1 / 8)
    await crowd.come(4)
    assert crowd.inside == [0]
    crowd.server.update_weight(3 / 8)
    await settled()
    assert crowd.inside == [0, 1, 2]
    crowd.server.update_weight(0.0)
    await crowd.end(0)
    await crowd.end(1)
    assert crowd.inside == [2]
    await crowd.end(2)
    assert crowd.inside == [3]
    await crowd.end(3)


async def test_who_leaves_while_waiting_takes_no_slot_along() -> None:
    crowd = Crowd(1)
    await crowd.come(3)
    crowd.tasks[1].cancel()
    await crowd.end(0)
    assert crowd.inside == [2]
    await crowd.end(2)
    assert crowd.server.load("train") == 0


async def test_a_file_of_atropos_without_evaluations_may_say_so() -> None:
    server = Server(APIServerConfig(num_requests_for_eval=0))
    async with asyncio.timeout(5), server.slots["eval"]:
        assert server.load("eval") > 0
