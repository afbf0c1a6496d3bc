"""D1: a completion waited for the steps of its own gateway alone, so rollouts were trained without their last steps."""

import asyncio
from pathlib import Path

import pytest

from stepwell.errors import PoolUnavailable
from stepwell.pool.api.calls import TELL_CALLS, CallBegun
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import (
    EndResult,
    FlushNeeded,
    Registration,
    RewardGiven,
)
from stepwell.pool.shard.gateway_roster import HEARTBEAT, LONGEST_RETURN
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.pool.slices.calls import TellCalls
from stepwell.pool.slices.steps import AddSteps, GiveReward
from stepwell.pool.slices.trajectories import ChannelIfOpen, Complete, Register
from stepwell.steps.columns import pack
from tests.builders import make_step
from tests.rig.asked import asked

COMPLETION = Complete("t", "p", 1.0, gateway="a")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shard(clock: Clock) -> ShardService:
    return ShardService(PoolPlan(), "data_pool", monotonic=clock, recheck_interval=0.01)


async def serve(shard: ShardService, *gateways: str) -> None:
    """The first gateway opens a trajectory, and each of the others gets a call of it."""
    await shard.run([Register(Registration("t", "p", gateway=gateways[0]))])
    for gateway in gateways[1:]:
        assert await shard.run([ChannelIfOpen("t", "p", gateway)]) == ["train"]


async def send_step(shard: ShardService, uid: str) -> None:
    await asked(shard, AddSteps(pack([make_step(uid=uid)])))


async def test_a_trajectory_of_one_gateway_is_completed_at_once(shard: ShardService) -> None:
    await serve(shard, "a")
    await send_step(shard, "s")
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


async def test_a_completion_waits_until_the_other_gateways_have_sent_what_they_hold(shard: ShardService) -> None:
    await serve(shard, "a", "b", "c")
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    completing = asyncio.create_task(shard.run_flushed(COMPLETION, 30.0))
    for gateway in ("b", "c"):
        assert await shard.flush_requests(gateway, 30.0) == ["t"]
        await send_step(shard, gateway)
        assert not completing.done()
        await shard.flushed(gateway, ["t"])
    assert await completing is EndResult.COMPLETED
    assert len(shard.pool.state.trajectories["t"].steps) == 2


async def pass_time(shard: ShardService, clock: Clock, seconds: float) -> None:
    """Only the first gateway is heard meanwhile."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 1.0
        await shard.flush_requests("a", 0.0)


async def test_a_gateway_that_is_dead_is_not_waited_for(shard: ShardService, clock: Clock) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    await pass_time(shard, clock, HEARTBEAT + 1)
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


async def test_a_gateway_that_dies_meanwhile_is_not_waited_for(shard: ShardService, clock: Clock) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    completing = asyncio.create_task(shard.run_flushed(COMPLETION, 30.0))
    assert await shard.flush_requests("b", 30.0) == ["t"]
    await pass_time(shard, clock, HEARTBEAT + 1)
    assert await completing is EndResult.COMPLETED


@pytest.mark.parametrize("is_back_first", [True, False])
async def test_a_gateway_that_could_not_ask_the_shard_may_hold_steps_of_any_trajectory(
    shard: ShardService, clock: Clock, is_back_first: bool
) -> None:
    await shard.flush_requests("b", 0.0)
    await serve(shard, "a")
    await pass_time(shard, clock, 3.0)
    if is_back_first:
        assert await shard.flush_requests("b", 0.0) == [TELL_CALLS]
        await asked(shard, TellCalls("b", [CallBegun("t", "p", "answered unchecked", "b")]))
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    completing = asyncio.create_task(shard.run_flushed(COMPLETION, 30.0))
    await asyncio.sleep(0)
    requested = await shard.flush_requests("b", 30.0)
    assert requested == (["t"] if is_back_first else [TELL_CALLS, "t"])
    await asked(shard, TellCalls("b", []))
    await send_step(shard, "answered unchecked")
    await shard.flushed("b", ["t"])
    assert await completing is EndResult.COMPLETED
    assert len(shard.pool.state.trajectories["t"].steps) == 1


@pytest.mark.parametrize(("silence", "waits"), [(5.0, HEARTBEAT), (45.0, 45.0), (600.0, LONGEST_RETURN)])
async def test_a_shard_that_was_cut_off_takes_no_gateway_for_dead_before_it_could_come_back(
    shard: ShardService, clock: Clock, silence: float, waits: float
) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    clock.now += silence
    await pass_time(shard, clock, waits - 1)
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    await pass_time(shard, clock, 4)
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


async def test_a_gateway_that_ends_in_order_is_not_waited_for(shard: ShardService) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    await shard.leave("b")
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


async def test_a_living_gateway_that_does_not_flush_delays_the_completion_and_is_asked_again(
    shard: ShardService,
) -> None:
    await serve(shard, "a", "b")
    with pytest.raises(PoolUnavailable, match="1 gateways have not sent their steps of trajectory t"):
        await shard.run_flushed(COMPLETION, 0.05)
    assert not shard.pool.state.trajectories["t"].completed
    assert await shard.flush_requests("b", 30.0) == ["t"]


async def test_after_a_restart_all_gateways_are_asked(tmp_path: Path, clock: Clock) -> None:
    def started() -> tuple[ShardService, SqliteJournal]:
        journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
        return ShardService(PoolPlan(), "data_pool", journal=journal, monotonic=clock, recheck_interval=0.01), journal

    shard, journal = started()
    await serve(shard, "a", "b")
    journal.close()
    shard, journal = started()
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    await send_step(shard, "s")
    await shard.flushed("b", ["t"])
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded), "it has not told its calls"
    assert TELL_CALLS in await shard.flush_requests("b", 0.0)
    await asked(shard, TellCalls("b", []))
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]
    journal.close()


async def test_after_a_restart_a_gateway_is_asked_that_had_only_listened(tmp_path: Path, clock: Clock) -> None:
    def started() -> tuple[ShardService, SqliteJournal]:
        journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
        return ShardService(PoolPlan(), "data_pool", journal=journal, monotonic=clock, recheck_interval=0.01), journal

    shard, journal = started()
    assert await shard.flush_requests("b", 0.0) == []
    await serve(shard, "a")
    journal.close()
    shard, journal = started()
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    journal.close()


async def test_the_reward_of_a_step_waits_until_the_gateway_that_holds_the_step_has_sent_it(
    shard: ShardService,
) -> None:
    await serve(shard, "a", "b")
    reward = RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5, step_index=0, gateway="a")
    rewarding = asyncio.create_task(shard.run_flushed(GiveReward(reward), 30.0))
    assert await shard.flush_requests("b", 30.0) == ["t"]
    await send_step(shard, "s")
    await shard.flushed("b", ["t"])
    assert await rewarding
    (step,) = shard.pool.state.trajectories["t"].steps.values()
    assert step.reward == 0.5


async def test_the_reward_of_a_trajectory_waits_for_no_gateway(shard: ShardService) -> None:
    await serve(shard, "a", "b")
    assert await asked(shard, GiveReward(RewardGiven(trajectory_uid="t", prompt_uid="p", value=0.5, gateway="a")))


async def test_a_shard_without_its_journal_refuses_what_gateways_tell_it() -> None:
    shard = ShardService(PoolPlan(), "data_pool", refusal="it waits for its journal")
    for call in (shard.flush_requests("a", 0.0), shard.flushed("a", ["t"]), shard.leave("a")):
        with pytest.raises(PoolUnavailable, match="waits for its journal"):
            await call
