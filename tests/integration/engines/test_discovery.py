"""Engines that DNS lists, with a lookup that the test answers."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from rig.local_pool import LocalPool
from stepwell.engines.discovery import MISSING_LOOKUPS, EngineDiscovery, look_up
from stepwell.engines.fleet import EngineFleet
from stepwell.errors import PoolUnavailable

NAME = "dns://engines.example:8001"
ONE, OTHER = "http://10.0.0.1:8001", "http://10.0.0.2:8001"


class Lookups:
    """What DNS answers."""

    def __init__(self, *ips: str) -> None:
        self.answer: list[str] | Exception = [*ips]
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
async def fleet(pool: LocalPool) -> AsyncIterator[EngineFleet]:
    async with EngineFleet([]) as fleet:
        fleet.share(pool)
        yield fleet


def addresses(fleet: EngineFleet) -> list[str]:
    return [engine.address for engine in fleet.replicas]


async def shared(pool: LocalPool) -> tuple[str, ...]:
    return (await pool.serving_after(None)).engines or ()


async def test_all_addresses_of_a_name_join_the_list_of_the_pool(fleet: EngineFleet, pool: LocalPool) -> None:
    lookups = Lookups("10.0.0.2", "10.0.0.1")
    await EngineDiscovery(NAME, fleet, lookup=lookups).look()
    assert lookups.asked == [("engines.example", 8001)]
    assert addresses(fleet) == [ONE, OTHER]
    assert await shared(pool) == (ONE, OTHER)


async def test_an_engine_leaves_when_it_is_not_listed_several_times_one_after_the_other(
    fleet: EngineFleet, pool: LocalPool
) -> None:
    lookups = Lookups("10.0.0.1", "10.0.0.2")
    discovery = EngineDiscovery(NAME, fleet, lookup=lookups)
    await discovery.look()
    lookups.answer = ["10.0.0.1"]
    for _ in range(MISSING_LOOKUPS - 1):
        await discovery.look()
    assert addresses(fleet) == [ONE, OTHER]
    await discovery.look()
    assert addresses(fleet) == [ONE]
    assert await shared(pool) == (ONE,)
    lookups.answer = ["10.0.0.1", "10.0.0.2"]
    await discovery.look()
    assert addresses(fleet) == [ONE, OTHER]


@pytest.mark.parametrize("answer", [[], socket.gaierror(-2, "Name or service not known")])
async def test_while_dns_lists_nothing_the_engines_stay_and_that_is_said_once(
    fleet: EngineFleet, answer: list[str] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    lookups = Lookups("10.0.0.1")
    discovery = EngineDiscovery(NAME, fleet, lookup=lookups)
    await discovery.look()
    lookups.answer = answer
    for _ in range(2 * MISSING_LOOKUPS):
        await discovery.look()
    assert addresses(fleet) == [ONE]
    (said,) = [record.getMessage() for record in caplog.records if "cannot be looked up" in record.getMessage()]
    assert said.startswith(f"{NAME} cannot be looked up, so its engines stay as they are: ")


async def test_an_engine_that_the_operator_removed_is_not_brought_back(fleet: EngineFleet, pool: LocalPool) -> None:
    discovery = EngineDiscovery(NAME, fleet, lookup=Lookups("10.0.0.1", "10.0.0.2"))
    await discovery.look()
    await fleet.leave(OTHER)
    await discovery.look()
    assert addresses(fleet) == [ONE]


async def test_one_of_two_gateways_may_be_slower_to_see_that_an_engine_is_gone(pool: LocalPool) -> None:
    async with EngineFleet([]) as fast, EngineFleet([]) as slow:
        lookups = Lookups("10.0.0.1", "10.0.0.2")
        discoveries = []
        for fleet in (fast, slow):
            fleet.share(pool)
            discoveries.append(EngineDiscovery(NAME, fleet, lookup=lookups))
            await discoveries[-1].look()
        lookups.answer = ["10.0.0.1"]
        await slow.remove(OTHER)  # as when the pool's list arrives
        for discovery in discoveries:
            for _ in range(MISSING_LOOKUPS):
                await discovery.look()
        assert addresses(fast) == addresses(slow) == [ONE]
        lookups.answer = ["10.0.0.1", "10.0.0.2"]
        await discoveries[1].look()
        assert addresses(slow) == [ONE, OTHER]


async def test_while_the_pool_is_away_a_new_engine_serves_and_the_pool_is_told_later(
    fleet: EngineFleet, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(**_: object) -> None:
        raise PoolUnavailable("it is away")

    discovery = EngineDiscovery(NAME, fleet, lookup=Lookups("10.0.0.1"))
    with monkeypatch.context() as patched:
        patched.setattr(pool, "change_engines", away)
        await discovery.look()
        assert addresses(fleet) == [ONE]
    await discovery.look()
    assert await shared(pool) == (ONE,)


async def test_the_real_lookup_lists_every_address_once() -> None:
    assert await look_up("127.0.0.1", 8001) == ["127.0.0.1"]
    assert await look_up("localhost", 8001)
    with pytest.raises(OSError):  # noqa: PT011 - the text is the system's
        await asyncio.wait_for(look_up("no-such-host.invalid", 8001), 30)
