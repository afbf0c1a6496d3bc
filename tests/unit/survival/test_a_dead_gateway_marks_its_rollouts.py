"""x2: a rollout whose gateway died with a call of it was trained without that call, as if it were whole."""

from pathlib import Path

import pytest
from stepwell.pool.slices.producing import AddSteps, BeginCall, Complete, EndCall, Register, TellCalls
from stepwell.steps.trainable import INCOMPLETE, UNSEEN, fault_kind

from rig.asked import asked
from rig.builders import make_step
from rig.requested import requested
from stepwell.pool.api.plan import Limits, OnIncomplete, PoolPlan
from stepwell.pool.api.producing import TELL_CALLS, CallBegun, Registration, Repeats
from stepwell.pool.shard.gateway_roster import HEARTBEAT
from stepwell.pool.shard.service import ShardService
from stepwell.pool.shard.sqlite_journal import SqliteJournal
from stepwell.steps.columns import pack


class PoolClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> PoolClock:
    return PoolClock()


def start(clock: PoolClock, limits: Limits | None = None, journal: SqliteJournal | None = None) -> ShardService:
    plan = PoolPlan(limits=limits or Limits())
    return ShardService(plan, "data_pool", journal=journal, monotonic=clock, recheck_interval=0.01)


@pytest.fixture
async def shard(clock: PoolClock) -> ShardService:
    """With a rollout that has a step of gateway a."""
    shard = start(clock)
    await begin_rollout(shard)
    return shard


async def begin_rollout(shard: ShardService) -> None:
    await asked(shard, Register(Registration("t", "p", gateway="a")))
    await call(shard, "s", "a")
    await add_step(shard, "s")


async def call(
    shard: ShardService, uid: str, gateway: str, key: str = "", repeats: Repeats = Repeats.NONE, trajectory: str = "t"
) -> None:
    await asked(shard, BeginCall(CallBegun(trajectory, "p", uid, gateway, key, repeats)))


async def add_step(shard: ShardService, uid: str) -> None:
    await asked(shard, AddSteps(pack([make_step(uid=uid)])))


async def die(shard: ShardService, clock: PoolClock, seconds: float = HEARTBEAT + 1) -> None:
    """Only gateway a is heard meanwhile."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 1.0
        await requested(shard, "a")


async def complete(shard: ShardService) -> None:
    await asked(shard, Complete("t", "p", 1.0, gateway="a"))


def kinds(shard: ShardService) -> list[str | None]:
    """Why each step of the rollout is left out."""
    steps = shard.pool.state.trajectories["t"].steps.values()
    return [None if step.untrainable is None else fault_kind(step.untrainable) for step in steps]


def lost_calls(shard: ShardService) -> list[tuple[str, str]]:
    return list(shard.pool.state.trajectories["t"].lost_calls)


async def test_a_rollout_of_whose_call_the_gateway_died_is_incomplete(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "missing", "b")
    await die(shard, clock)
    await complete(shard)
    assert kinds(shard) == [INCOMPLETE]


async def test_the_steps_that_follow_are_of_an_incomplete_rollout_too(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "missing", "b")
    await die(shard, clock)
    await add_step(shard, "next")
    assert kinds(shard) == [INCOMPLETE, INCOMPLETE]


async def test_a_rollout_whose_calls_have_all_arrived_is_whole_whoever_dies(
    shard: ShardService, clock: PoolClock
) -> None:
    await call(shard, "second", "b")
    await add_step(shard, "second")
    await die(shard, clock)
    await complete(shard)
    assert kinds(shard) == [None, None]


async def test_a_call_without_a_step_is_not_missed(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "refused", "b")
    await asked(shard, EndCall("t", "p", "refused"))
    await die(shard, clock)
    assert kinds(shard) == [None]


async def test_a_step_that_its_gateway_gave_up_is_missed_at_once(shard: ShardService) -> None:
    await call(shard, "given up", "a")
    await asked(shard, EndCall("t", "p", "given up", is_lost=True))
    assert kinds(shard) == [INCOMPLETE]


async def test_a_step_that_was_given_up_stays_missing_whatever_its_gateway_tells(shard: ShardService) -> None:
    await call(shard, "given up", "a")
    await asked(shard, EndCall("t", "p", "given up", is_lost=True))
    await asked(shard, TellCalls("a", []))
    assert kinds(shard) == [INCOMPLETE]


async def test_what_a_gateway_tells_closes_its_other_calls(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "its end was not heard", "b")
    await asked(shard, TellCalls("b", []))
    await die(shard, clock)
    assert kinds(shard) == [None]


async def test_a_step_that_comes_after_all_is_missed_no_more(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "in a spool", "b")
    await die(shard, clock)
    assert kinds(shard) == [INCOMPLETE]
    await add_step(shard, "in a spool")
    assert kinds(shard) == [None, None]


@pytest.mark.parametrize("key", ["", "same"])
async def test_a_gateway_that_was_only_cut_off_tells_its_calls_and_they_are_lost_no_more(
    shard: ShardService, clock: PoolClock, key: str
) -> None:
    await call(shard, "held", "b", key)
    await call(shard, "over", "b")
    await die(shard, clock)
    assert sorted(lost_calls(shard)) == [("b", "held"), ("b", "over")]
    assert await requested(shard, "b") == [TELL_CALLS]
    await asked(shard, TellCalls("b", [CallBegun("t", "p", "held", "b", key)]))
    assert kinds(shard) == [None]
    await die(shard, clock)
    assert lost_calls(shard) == [("b", "held")]


@pytest.mark.parametrize("is_noticed_first", [True, False])
async def test_what_is_asked_again_of_another_gateway_is_not_missed(
    shard: ShardService, clock: PoolClock, is_noticed_first: bool
) -> None:
    await call(shard, "first try", "b", "same", Repeats.LOST)
    if is_noticed_first:
        await die(shard, clock)
    await call(shard, "second try", "a", "same", Repeats.LOST)
    await add_step(shard, "second try")
    await die(shard, clock)
    assert kinds(shard) == [None, None]


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("is_step_first", [True, False])
async def test_of_two_calls_with_a_key_the_one_that_began_later_is_read_whichever_is_announced_first(
    shard: ShardService, is_late: bool, is_step_first: bool
) -> None:
    first = CallBegun("t", "p", "first try", "b", "same", Repeats.ALL, began_at=1.0)
    second = CallBegun("t", "p", "second try", "a", "same", Repeats.ALL, began_at=2.0)
    if is_step_first:
        await add_step(shard, "first try")
    for announced in (second, first) if is_late else (first, second):
        await asked(shard, BeginCall(announced))
    if not is_step_first:
        await add_step(shard, "first try")
    await add_step(shard, "second try")
    steps = shard.pool.state.trajectories["t"].steps
    assert fault_kind(steps["first try"].untrainable or "") == UNSEEN
    assert steps["second try"].untrainable is None


async def test_a_pause_of_the_shard_is_no_death_of_a_gateway(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "under way", "b")
    clock.now += 10 * HEARTBEAT
    await requested(shard, "a")
    assert kinds(shard) == [None]
    assert "b" in shard.shard.gateways.living()


async def test_marks_survive_a_restart(tmp_path: Path, clock: PoolClock) -> None:
    journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
    shard = start(clock, journal=journal)
    await begin_rollout(shard)
    await call(shard, "missing", "b")
    await die(shard, clock)
    await complete(shard)
    journal.close()
    journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
    assert kinds(start(clock, journal=journal)) == [INCOMPLETE]
    journal.close()


@pytest.mark.parametrize("is_back", [True, False])
async def test_after_a_restart_a_gateway_that_never_told_may_have_had_a_call(
    tmp_path: Path, clock: PoolClock, is_back: bool
) -> None:
    journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
    shard = start(clock, journal=journal)
    await begin_rollout(shard)
    await call(shard, "missing", "b")
    journal.close()
    journal = SqliteJournal(tmp_path / "journal.db", closed_kept=10)
    shard = start(clock, journal=journal)
    if is_back:
        assert await requested(shard, "b") == [TELL_CALLS]
        await asked(shard, TellCalls("b", []))
    await die(shard, clock, 2 * HEARTBEAT + 2)
    assert kinds(shard) == [None if is_back else INCOMPLETE]
    journal.close()


async def test_a_gateway_that_ends_in_order_takes_nothing_with_it(shard: ShardService, clock: PoolClock) -> None:
    await call(shard, "second", "b")
    await shard.leave("b")
    await die(shard, clock)
    assert kinds(shard) == [None]


async def test_with_on_incomplete_keep_the_rollout_is_trained(clock: PoolClock) -> None:
    shard = start(clock, Limits(on_incomplete=OnIncomplete.KEEP))
    await begin_rollout(shard)
    await call(shard, "missing", "b")
    await die(shard, clock)
    assert kinds(shard) == [None]
    assert shard.pool.state.trajectories["t"].lost_calls == (("b", "missing"),)


async def test_a_call_of_a_rollout_that_the_shard_does_not_have_changes_nothing(shard: ShardService) -> None:
    await call(shard, "x", "b", trajectory="unknown")
    assert "unknown" not in shard.pool.state.trajectories


async def test_a_gateway_that_takes_over_a_spool_is_waited_for_in_place_of_the_one_that_died(
    shard: ShardService,
) -> None:
    await call(shard, "in the spool", "spool.1")
    await call(shard, "nowhere", "spool.1")
    await requested(shard, "spool.2")
    assert shard.shard.gateways.living() == ("a", "spool.2")
    trajectory = shard.pool.state.trajectories["t"]
    assert trajectory.gateways == ("a", "spool.2")
    await add_step(shard, "in the spool")
    assert trajectory.lost_calls == (("spool.1", "nowhere"),)
