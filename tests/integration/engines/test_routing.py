"""Which engine gets a call, while engines come and go."""

import asyncio

import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.waiting import until
from stepwell.engines.fleet import EngineFleet
from stepwell.errors import BadRequest, EngineUnavailable
from tests.integration.engines.engine_calls import (
    CHAT,
    LONG_STREAM,
    addresses,
    call,
    generations,
    watched,
)


async def test_engines_take_turns(two: tuple[FakeEngine, FakeEngine]) -> None:
    first, second = (fake.url for fake in two)
    async with watched(*two) as engines:
        assert await addresses(engines, 4) == [first, second, first, second]


async def test_the_least_busy_engine_is_chosen(two: tuple[FakeEngine, FakeEngine]) -> None:
    async with watched(*two, routing="least_busy") as engines:
        busy = await engines.send(CHAT, LONG_STREAM)
        idle = {fake.url for fake in two} - {busy.engine.address}
        assert set(await addresses(engines, 4)) == idle
        busy.close()


async def test_a_trajectory_stays_on_its_engine(two: tuple[FakeEngine, FakeEngine]) -> None:
    async with watched(*two, routing="sticky") as engines:
        homes = {f"t{i}": {(await call(engines, sticky=f"t{i}"))[1] for _ in range(3)} for i in range(16)}
    assert {len(found) for found in homes.values()} == {1}
    assert len(set.union(*homes.values())) == 2


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(BadRequest, match="random"):
        EngineFleet(["http://127.0.0.1:1"], routing="random")


async def test_engines_come_and_go_under_load(two: tuple[FakeEngine, FakeEngine]) -> None:
    first, second = two
    for fake in two:
        fake.faults = Faults(token_delay_s=0.002)
    async with watched(first) as engines:
        stop = asyncio.Event()

        async def keep_calling() -> set[int]:
            found = set()
            while not stop.is_set():
                found.add((await call(engines))[0])
            return found

        callers = [asyncio.create_task(keep_calling()) for _ in range(20)]
        await until(lambda: generations(first) > 20, "the load")
        await engines.add(second.url + "/")
        await engines.add(second.url)
        await until(lambda: generations(second) > 20, "the new engine to get calls")
        await engines.remove(first.url)
        served = generations(second)
        await until(lambda: generations(second) > served + 40, "each caller's next call")
        await until(lambda: first.in_flight == 0, "the old engine's last calls to end")
        arrived, served = generations(first), generations(second)
        await until(lambda: generations(second) > served + 40, "the calls to go on")
        assert generations(first) == arrived
        stop.set()
        assert set.union(*await asyncio.gather(*callers)) == {200}
        assert [view.address for view in engines.replicas] == [second.url]


async def test_a_call_in_flight_on_a_removed_engine_comes_to_its_end(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        reply = await engines.send(CHAT, LONG_STREAM)
        await engines.remove(engine.url)
        with pytest.raises(EngineUnavailable, match="there is none"):
            await call(engines)
        received = b""
        while data := await reply.next_bytes():
            received += data
        assert received.endswith(b"data: [DONE]\n\n")
        engine.weight_version = "4"
        assert await engines.version_after(reply.engine) == 4


async def test_what_is_no_engine_is_neither_added_nor_removed(engine: FakeEngine) -> None:
    async with watched(engine) as engines:
        with pytest.raises(BadRequest, match="not an address"):
            await engines.add("10.0.0.7:8000")
        with pytest.raises(BadRequest, match="no engine http://10.0.0.7:8000"):
            await engines.remove("http://10.0.0.7:8000")
