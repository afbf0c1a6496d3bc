"""D1: a completion waited for the steps of its own gateway alone, so rollouts were trained without their last steps."""

import asyncio
from pathlib import Path

import pytest
from stepwell.pool.slices.producing import (
    AddSteps,
    ChannelIfOpen,
    Complete,
    GiveReward,
    Register,
    TakeRequests,
    TellCalls,
)

from rig.asked import asked
from rig.builders import make_step
from rig.requested import next_requested, requested
from stepwell.errors import PoolUnavailable
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import (
    TELL_CALLS,
    CallBegun,
    EndResult,
    FlushNeeded,
    Registration,
    RewardGiven,
)
from stepwell.pool.api.transport import UNSEEN, flush_topic
from stepwell.pool.shard.gateway_roster import BUSY, HEARTBEAT, IDLE_PAUSE, LONGEST_RETURN, SHOW_PAUSE
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.columns import pack

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
        assert await next_requested(shard, gateway) == ["t"]
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
        await requested(shard, "a")


async def test_a_gateway_that_is_dead_is_not_waited_for(shard: ShardService, clock: Clock) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    await pass_time(shard, clock, HEARTBEAT + 1)
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


async def test_a_gateway_that_dies_meanwhile_is_not_waited_for(shard: ShardService, clock: Clock) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    completing = asyncio.create_task(shard.run_flushed(COMPLETION, 30.0))
    assert await next_requested(shard, "b") == ["t"]
    await pass_time(shard, clock, HEARTBEAT + 1)
    assert await completing is EndResult.COMPLETED


@pytest.mark.parametrize("is_back_first", [True, False])
async def test_a_gateway_that_could_not_ask_the_shard_may_hold_steps_of_any_trajectory(
    shard: ShardService, clock: Clock, is_back_first: bool
) -> None:
    await requested(shard, "b")
    await serve(shard, "a")
    await pass_time(shard, clock, 3.0)
    told = TellCalls("b", [CallBegun("t", "p", "answered unchecked", "b")])
    if is_back_first:
        assert await requested(shard, "b", has_told=False) == [TELL_CALLS]
        await asked(shard, told)
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    completing = asyncio.create_task(shard.run_flushed(COMPLETION, 30.0))
    await asyncio.sleep(0)
    if not is_back_first:
        assert await requested(shard, "b", has_told=False) == [TELL_CALLS]
        await asked(shard, told)
    assert await next_requested(shard, "b") == ["t"]
    await send_step(shard, "answered unchecked")
    await shard.flushed("b", ["t"])
    assert await completing is EndResult.COMPLETED
    assert len(shard.pool.state.trajectories["t"].steps) == 1


async def test_a_gateway_that_was_not_heard_for_a_while_says_that_it_has_answered_nothing_unknown(
    shard: ShardService, clock: Clock
) -> None:
    await requested(shard, "b")
    await serve(shard, "a")
    await send_step(shard, "s")
    await pass_time(shard, clock, 3.0)
    (answer,) = await shard.run([COMPLETION])
    assert isinstance(answer, FlushNeeded)
    completing = asyncio.create_task(shard.run_flushed(COMPLETION, 30.0))
    await asyncio.sleep(0)
    assert await requested(shard, "b") == []
    assert await completing is EndResult.COMPLETED


async def test_the_word_of_a_gateway_counts_from_when_it_was_given(shard: ShardService, clock: Clock) -> None:
    await requested(shard, "b")
    await serve(shard, "a")
    await send_step(shard, "s")
    clock.now += 3.0
    late = await asked(shard, TakeRequests("b", 1.0, has_told=True))
    assert late.pause == 0, "it was two seconds on its way, in which b may have answered without the shard"
    assert isinstance((await shard.run([COMPLETION]))[0], FlushNeeded)
    await asked(shard, TakeRequests("b", 0.0, has_told=True))
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


async def test_gateways_show_themselves_often_only_while_there_are_calls(shard: ShardService, clock: Clock) -> None:
    async def pause() -> float:
        await requested(shard, "b")
        return (await asked(shard, TakeRequests("b", 0.0, has_told=True))).pause

    assert await pause() == IDLE_PAUSE
    await serve(shard, "a")
    assert await pause() == SHOW_PAUSE
    clock.now += BUSY + 1
    assert await pause() == SHOW_PAUSE, "nobody was heard: that may be the shard's own pause"
    end = clock.now + BUSY + 1
    while clock.now < end:
        clock.now += 1.0
        await requested(shard, "b")
    assert await pause() == IDLE_PAUSE


async def test_in_an_idle_pool_no_gateway_is_dead_until_it_was_called_in_vain(
    shard: ShardService, clock: Clock
) -> None:
    await serve(shard, "a", "b")
    await send_step(shard, "s")
    for gateway in ("a", "b"):
        await requested(shard, gateway)
    while clock.now < BUSY + 1:
        clock.now += 1.0
        await requested(shard, "a")
        await requested(shard, "b")
    clock.now += IDLE_PAUSE
    await requested(shard, "a")
    assert isinstance((await shard.run([COMPLETION]))[0], FlushNeeded)
    news = await shard.wait_news("link of b", {flush_topic("b"): UNSEEN}, 1.0)
    assert news, "b is called"
    await pass_time(shard, clock, HEARTBEAT - 1)
    assert isinstance((await shard.run([COMPLETION]))[0], FlushNeeded)
    await pass_time(shard, clock, 2)
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]


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
    assert await next_requested(shard, "b") == ["t"]


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
    assert TELL_CALLS in await requested(shard, "b")
    await asked(shard, TellCalls("b", []))
    assert await shard.run([COMPLETION]) == [EndResult.COMPLETED]
    journal.close()


async def test_after_a_restart_a_gateway_is_asked_that_had_only_listened(tmp_path: Path, clock: Clock) -> None:
    def started() -> tuple[ShardService, SqliteJournal]:
        journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
        return ShardService(PoolPlan(), "data_pool", journal=journal, monotonic=clock, recheck_interval=0.01), journal

    shard, journal = started()
    assert await requested(shard, "b") == []
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
    assert await next_requested(shard, "b") == ["t"]
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
    for call in (requested(shard, "a"), shard.flushed("a", ["t"]), shard.leave("a")):
        with pytest.raises(PoolUnavailable, match="waits for its journal"):
            await call
