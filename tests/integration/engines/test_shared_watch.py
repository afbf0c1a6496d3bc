"""Several processes of one machine watch their engines together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rig.fake_engine import FakeEngine
from rig.waiting import until
from stepwell.engines import discovery as shared_watch
from stepwell.engines.discovery import SharedWatch
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.replica import EngineState
from tests.integration.engines.engine_calls import call, states


@asynccontextmanager
async def sharing(path: Path, *fakes: FakeEngine) -> AsyncIterator[tuple[EngineFleet, SharedWatch]]:
    async with EngineFleet([fake.url for fake in fakes]) as engines:
        shared = SharedWatch(path, engines)
        task = asyncio.create_task(shared.run())
        try:
            yield engines, shared
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_one_of_several_asks_and_all_know(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    async with sharing(path, engine) as (first, watch), sharing(path, engine) as (second, other):
        await until(lambda: watch.is_watching, "the first to watch")
        engine.pause()
        await until(lambda: states(first) == states(second) == [EngineState.PAUSED], "both to see the pause")
        engine.resume()
        await until(lambda: states(first) == states(second) == [EngineState.HEALTHY], "both to see its end")
        assert not other.is_watching
        assert (await call(second))[0] == 200


async def test_the_questions_do_not_grow_with_the_processes(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    async with sharing(path, engine) as (first, _):
        await until(lambda: states(first) == [EngineState.HEALTHY], "the engine")
        async with sharing(path, engine) as (second, _), sharing(path, engine) as (third, _):
            probed = engine.asked["/health"]
            await until(lambda: engine.asked["/health"] >= probed + 4, "four checks")
            checked_at = pytest.approx(first.replicas[0].report().checked_at, abs=1.0)
            assert second.replicas[0].report().checked_at == checked_at
            assert third.replicas[0].report().checked_at == checked_at
            began = asyncio.get_running_loop().time()
            before = engine.asked["/health"]
            await until(lambda: engine.asked["/health"] >= before + 4, "four more")
            assert asyncio.get_running_loop().time() - began > 1.2, "three watchers would need half a second"


async def test_when_the_watcher_ends_another_process_watches(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    async with sharing(path, engine) as (_, other):
        await until(lambda: other.is_watching, "the one that came first to watch")
    async with sharing(path, engine) as (first, watch):
        await until(lambda: watch.is_watching, "the next to watch, over the file of the one before")
        async with sharing(path, engine) as (second, other):
            await until(lambda: states(second) == [EngineState.HEALTHY], "the engine")
            assert not other.is_watching
        await until(lambda: states(first) == [EngineState.HEALTHY], "the first to be undisturbed")


async def test_a_process_that_hears_nothing_watches_for_itself(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engines"
    monkeypatch.setattr(shared_watch, "SILENCE", 0.2)
    async with sharing(path, engine) as (_, watch):
        await until(lambda: watch.is_watching, "the first to watch")
        monkeypatch.setattr(shared_watch, "TELL_INTERVAL", 1_000.0)
        async with sharing(path, engine) as (second, other):
            await until(lambda: other.is_watching, "the second to watch too")
            engine.pause()
            await until(lambda: states(second) == [EngineState.PAUSED], "its own sight of the pause")


async def test_an_older_sight_does_not_replace_what_a_call_found_out(engine: FakeEngine) -> None:
    async with EngineFleet([engine.url]) as engines:
        replica = engines.replicas[0]
        before = replica.report()
        replica.set_down("a call did not reach it")
        replica.take(before)
        assert states(engines) == [EngineState.DOWN]
        await replica.check()
        assert states(engines) == [EngineState.HEALTHY]
