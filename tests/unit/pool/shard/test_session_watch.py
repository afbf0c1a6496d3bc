"""A shard ends idle sessions by itself, and first asks the gateways for what they hold."""

import asyncio
from pathlib import Path

import pytest
from stepwell.pool.slices.producing import AddSteps, ChannelIfOpen, PlaceSession

from rig.asked import asked
from rig.builders import make_step
from rig.requested import next_requested, requested
from rig.waiting import until
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import SessionCall, SessionPlace, session_prompt_uid
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.columns import pack

IDLE = 10.0
SESSION = TrajectoryRef("s", session_prompt_uid("s"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_service(clock: Clock, journal: SqliteJournal | None = None) -> ShardService:
    plan = PoolPlan(limits=Limits(session_idle=IDLE))
    return ShardService(plan, plan.name, journal=journal, clock=clock, monotonic=clock, recheck_interval=0.001)


async def open_session(service: ShardService, gateway: str = "") -> None:
    (place,) = await service.run([PlaceSession(SessionCall("s", "next", gateway=gateway))])
    assert place == SessionPlace("s", "train")
    await asked(service, AddSteps(pack([make_step("s", SESSION.prompt_uid)])))


def is_completed(service: ShardService) -> bool:
    return service.pool.state.trajectories["s"].completed


async def test_a_shard_that_nobody_calls_ends_idle_sessions(clock: Clock) -> None:
    service = make_service(clock)
    await open_session(service)
    clock.now += IDLE
    await until(lambda: is_completed(service), "the idle end")
    assert (await service.stats()).sessions.ended_idle == 1
    assert (await service.run([PlaceSession(SessionCall("s", "next"))])) == [SessionPlace("next", "train")]


async def test_an_idle_session_waits_for_the_steps_that_a_gateway_holds(clock: Clock) -> None:
    service = make_service(clock)
    await open_session(service, "gateway")
    clock.now += IDLE
    assert await next_requested(service, "gateway") == ["s"]
    assert not is_completed(service)
    await asked(service, AddSteps(pack([make_step("s", SESSION.prompt_uid, uid="held")])))
    await service.flushed("gateway", ["s"])
    assert not is_completed(service)
    clock.now += IDLE
    assert await requested(service, "gateway") == []
    await until(lambda: is_completed(service), "the idle end")
    assert len(service.pool.state.trajectories["s"].steps) == 2


async def test_a_gateway_with_a_call_in_flight_keeps_its_session_open(clock: Clock) -> None:
    service = make_service(clock)
    await open_session(service, "gateway")
    clock.now += IDLE
    assert await next_requested(service, "gateway") == ["s"]
    await service.run([ChannelIfOpen(SESSION.trajectory_uid, SESSION.prompt_uid, "gateway")])
    await service.flushed("gateway", ["s"])
    trajectory = service.pool.state.trajectories["s"]
    await until(lambda: trajectory.gateways == ("gateway",), "the gateway to be attached again")
    assert not is_completed(service)


async def test_after_a_restart_a_session_has_its_idle_time_again(clock: Clock, tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "shard.sqlite", closed_kept=100)
    service = make_service(clock, journal)
    await open_session(service)
    service._session_watch._watching.cancel()  # type: ignore[union-attr]
    clock.now += IDLE / 2
    await service.stats()
    journal.close()
    clock.now += 100 * IDLE
    journal = SqliteJournal(tmp_path / "shard.sqlite", closed_kept=100)
    service = make_service(clock, journal)
    assert (await service.stats()).sessions.open == 1
    clock.now += IDLE - 1
    await asyncio.sleep(0.02)
    assert not is_completed(service)
    clock.now += 1
    await until(lambda: is_completed(service), "the idle end")
    journal.close()
