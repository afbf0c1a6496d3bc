"""The rollouter over a real gateway: pacing, failing agents, refills, validation, and how it stops."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.agents.blackbox import Agent, BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import Rollout, RolloutResult, RolloutStatus
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.agents.validation import Validation, ValidationReport
from stepwell.errors import BadRequest
from stepwell.pool.api.plan import OnDeadline
from stepwell.pool.api.producing import Registration

SAMPLES = [{"n": n} for n in range(20)]


async def ask(rollout: Rollout) -> None:
    await rollout.chat([{"role": "user", "content": f"{rollout.sample['n']}"}], max_tokens=2)


async def answering(rollout: Rollout) -> float:
    await ask(rollout)
    return float(rollout.sample["n"])


class WatchedPool(LocalPool):
    """Remembers the most rollouts that were ever under way or waiting for the trainer."""

    most = 0

    async def register_trajectory(self, wanted: Registration) -> None:
        await super().register_trajectory(wanted)
        now = self.rules.pacing(wanted.channel or "train")
        self.most = max(self.most, now.in_flight + now.queued)


def rollouter_of(
    url: str, agent: Agent = answering, *, group_size: int = 4, timeout: float = 90.0, **settings: Any
) -> AsyncRollouter:
    flow = BlackBoxAgentFlow(url, agent, group_size=group_size, timeout=timeout)
    return AsyncRollouter(flow, Dataset(SAMPLES), gateway=url, **settings)


def ready(pool: LocalPool) -> int:
    channel = pool.rules.stats().channels.get("train")
    return 0 if channel is None else channel.ready_groups


@asynccontextmanager
async def running(rollouter: AsyncRollouter, groups: int | None = None) -> AsyncIterator["asyncio.Task[Any]"]:
    run = asyncio.create_task(rollouter.run(groups))
    try:
        yield run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_so_many_groups_are_made_each_of_one_sample_and_whole(gateway: str, pool: LocalPool) -> None:
    results: list[RolloutResult] = []
    tally = await rollouter_of(gateway, on_result=results.append).run(groups=5)
    assert (tally.groups, tally.rollouts) == (5, Counter(completed=20))
    assert len(results) == 20
    groups = pool.rules.take(5)
    assert groups is not None
    for steps in groups:
        assert len(steps) == 4
        assert len({(step.prompt_uid, step.metadata["n"], step.reward) for step in steps}) == 1


async def test_the_end_of_the_dataset_is_the_end_of_the_run(gateway: str, pool: LocalPool) -> None:
    flow = BlackBoxAgentFlow(gateway, answering, group_size=1)
    tally = await AsyncRollouter(flow, Dataset(SAMPLES[:3], epochs=2), gateway=gateway).run()
    assert tally.groups == ready(pool) == 6


async def test_the_pools_pacing_is_kept_while_a_trainer_takes_what_is_ready(engine: FakeEngine) -> None:
    pool = WatchedPool(batch_size=8, max_staleness=1)
    async with serve_gateway(pool, [engine.url]) as url, running(rollouter_of(url), groups=12) as run:
        for _ in range(6):
            await until(lambda: ready(pool) >= 2, "a batch to be ready")
            assert pool.rules.take(2) is not None
        assert (await run).groups == 12
    assert pool.most == 16


async def test_a_pool_that_wants_nothing_gets_nothing_more(engine: FakeEngine) -> None:
    pool = WatchedPool(batch_size=4, max_staleness=0)
    async with serve_gateway(pool, [engine.url]) as url, running(rollouter_of(url)) as run:
        await until(lambda: ready(pool) == 1, "the first group")
        asked = engine.request_count
        await asyncio.wait([run], timeout=0.5)
        assert engine.request_count == asked
        assert pool.rules.take(1) is not None
        await until(lambda: ready(pool) == 1, "the next group")


async def test_no_more_agents_run_than_allowed(gateway: str) -> None:
    now = most = 0

    async def agent(rollout: Rollout) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await ask(rollout)
        now -= 1
        return 1.0

    await rollouter_of(gateway, agent, concurrency=3).run(groups=5)
    assert most == 3


async def test_groups_complete_under_agents_that_fail_now_and_then(gateway: str, pool: LocalPool) -> None:
    calls = 0

    async def agent(rollout: Rollout) -> float:
        nonlocal calls
        calls += 1
        await ask(rollout)
        if rollout.attempt == 0 and calls % 3 == 0:
            raise ConnectionError("a bad day")
        return 1.0

    tally = await rollouter_of(gateway, agent).run(groups=6)
    assert tally.groups == ready(pool) == 6
    assert tally.given_up == 0
    assert tally.rollouts["completed"] == 24
    assert tally.rollouts["aborted"] > 3
    assert "a bad day" in tally.line(0, 1.0)


async def test_groups_complete_under_an_engine_that_fails_now_and_then(
    gateway: str, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.faults = Faults(error_status=500, times=5)
    tally = await rollouter_of(gateway).run(groups=4)
    assert tally.groups == ready(pool) == 4
    assert tally.rollouts["aborted"] == 5


async def test_a_group_that_fails_too_often_is_given_up_and_its_running_rollouts_end(
    gateway: str, pool: LocalPool
) -> None:
    waiting = asyncio.Event()

    async def agent(rollout: Rollout) -> float:
        await ask(rollout)
        if rollout.sample["n"] != unlucky:
            return 1.0
        if not waiting.is_set():
            waiting.set()
            await asyncio.Event().wait()
        raise ConnectionError("never")

    unlucky = next(iter(Dataset(SAMPLES))).sample["n"]
    tally = await rollouter_of(gateway, agent, retries=1, group_size=2).run(groups=3)
    assert (tally.groups, tally.given_up) == (2, 1)
    assert tally.rollouts["aborted"] == 2
    assert ready(pool) == 2
    assert pool.rules.pacing("train").in_flight == 0


async def test_a_group_that_is_given_up_leaves_nothing_in_the_pool(gateway: str, pool: LocalPool) -> None:
    begun = 0

    async def agent(rollout: Rollout) -> float:
        nonlocal begun
        begun += 1
        is_last = begun > 3
        await ask(rollout)
        if is_last:
            await until(lambda: pool.rules.pacing("train").queued == 3, "the others to be complete")
            raise ConnectionError("never")
        return 1.0

    tally = await rollouter_of(gateway, agent, retries=1).run(groups=1)
    assert (tally.groups, tally.given_up, tally.rollouts) == (0, 1, Counter(completed=3, aborted=2))
    assert pool.rules.pacing("train").queued == 0
    stats = pool.rules.stats().channels["train"]
    assert (stats.groups, stats.dropped["aborted"].steps) == (0, 5)


class FirstIsStuck:
    """An agent whose first rollout goes on after the others have ended."""

    def __init__(self) -> None:
        self.go_on: asyncio.Event | None = None

    async def __call__(self, rollout: Rollout) -> float:
        await ask(rollout)
        if self.go_on is None:
            self.go_on = asyncio.Event()
            await self.go_on.wait()
        return 1.0

    def release(self) -> None:
        assert self.go_on is not None
        self.go_on.set()


async def test_a_rollout_that_is_open_at_the_deadline_is_a_failure_in_its_group(engine: FakeEngine) -> None:
    pool, agent = LocalPool(group_deadline=100.0, unfinished_reward=-1.0), FirstIsStuck()
    async with serve_gateway(pool, [engine.url]) as url, running(rollouter_of(url, agent), groups=1) as run:
        await until(lambda: pool.rules.pacing("train").queued == 3, "all but the one that is stuck")
        pool.advance_to(101.0)
        await until(lambda: ready(pool) == 1, "the deadline to end the group")
        agent.release()
        tally = await run
    assert tally.rollouts == Counter(completed=3, late=1)
    assert sorted(step.reward or 0.0 for step in pool.taken()) == [-1.0, 1.0, 1.0, 1.0]
    assert pool.rules.stats().unfinished == 1


async def test_a_rollout_brings_the_reward_of_its_flow_for_taking_too_long(engine: FakeEngine) -> None:
    pool, agent = LocalPool(group_deadline=100.0), FirstIsStuck()
    async with serve_gateway(pool, [engine.url]) as url:
        flow = BlackBoxAgentFlow(url, agent, group_size=2, timeout=90.0, failure_rewards={AgentFailure.TOO_LONG: -2.0})
        async with running(AsyncRollouter(flow, Dataset(SAMPLES), gateway=url), groups=1) as run:
            await until(lambda: pool.rules.pacing("train").queued == 1, "the one that is not stuck")
            pool.advance_to(101.0)
            await until(lambda: ready(pool) == 1, "the deadline to end the group")
            agent.release()
            await run
    assert sorted(step.reward or 0.0 for step in pool.taken()) == [-2.0, 1.0]


@pytest.mark.parametrize("timeout", [100.0, 600.0])
async def test_a_timeout_that_the_pools_deadline_never_lets_pass_is_refused(engine: FakeEngine, timeout: float) -> None:
    pool = LocalPool(group_deadline=100.0)
    async with serve_gateway(pool, [engine.url]) as url:
        with pytest.raises(BadRequest, match=r"may take \d+ s .* ends every group after 100 s \(--group-deadline\)"):
            await rollouter_of(url, timeout=timeout).run(groups=1)
    assert engine.request_count == 0


async def test_a_group_over_its_deadline_is_filled_up_again(engine: FakeEngine) -> None:
    pool = LocalPool(group_deadline=100.0, on_deadline=OnDeadline.REFILL, unfinished_reward=None)
    agent = FirstIsStuck()
    async with serve_gateway(pool, [engine.url]) as url, running(rollouter_of(url, agent), groups=1) as run:
        await until(lambda: pool.rules.pacing("train").queued == 3, "all but the one that is stuck")
        pool.advance_to(101.0)
        await until(lambda: ready(pool) == 1, "the group to be filled up")
        agent.release()
        tally = await run
    assert tally.rollouts == Counter(completed=4, late=1)
    assert len(pool.taken()) == 4
    assert pool.rules.stats().channels["train"].groups == 0, "nothing was made that no group needs"


async def test_validation_is_on_its_own_channel_at_the_start_and_every_so_many_versions(
    engine: FakeEngine,
) -> None:
    pool, reports = LocalPool(batch_size=4, max_staleness=0), list[ValidationReport]()

    async def validated(rollout: Rollout) -> float:
        await ask(rollout)
        return 0.5

    async def trained(rollout: Rollout) -> float:
        await ask(rollout)
        return 1.0

    async with serve_gateway(pool, [engine.url]) as url:
        validation = Validation(
            flow=BlackBoxAgentFlow(url, validated, channel="validation", group_size=2),
            dataset=Dataset(SAMPLES[:3]),
            every=2,
        )
        rollouter = rollouter_of(url, trained, validation=validation, on_validation=reports.append)
        async with running(rollouter):
            for version, rounds in (("default", 1), ("1", 1), ("2", 2), ("3", 2), ("5", 3)):
                engine.weight_version = version
                await until(lambda rounds=rounds: len(reports) >= rounds, "a round")  # type: ignore[misc]
                await until(lambda: ready(pool) == 1, "a group to train with")
                assert pool.rules.take(1) is not None
    assert [report.policy_version for report in reports] == [None, 2, 5]
    assert all((report.mean_reward, report.completed, report.failed) == (0.5, 6, 0) for report in reports)
    channels = pool.rules.stats().channels
    assert channels["validation"].accepted.steps == 18
    assert channels["validation"].ready_groups == 9
    while steps := pool.rules.take(1):
        assert {step.reward for step in steps[0]} == {1.0}
    while steps := pool.rules.take(1, "validation"):
        assert {step.reward for step in steps[0]} == {0.5}


def test_validation_on_the_channel_of_training_is_refused() -> None:
    flow, other = (BlackBoxAgentFlow("http://127.0.0.1:1", answering) for _ in range(2))
    with pytest.raises(BadRequest, match="both on channel 'train'"):
        AsyncRollouter(
            flow,
            Dataset(SAMPLES),
            gateway="http://127.0.0.1:1",
            validation=Validation(flow=other, dataset=Dataset(SAMPLES)),
        )


async def test_told_to_stop_it_finishes_the_groups_that_are_open(gateway: str, pool: LocalPool) -> None:
    rollouter = rollouter_of(gateway, concurrency=6)
    async with running(rollouter) as run:
        await until(lambda: ready(pool) >= 2, "two groups")
        rollouter.stop()
        tally = await run
    assert tally.groups == ready(pool) == pool.rules.stats().channels["train"].groups
    assert pool.rules.pacing("train").in_flight == 0


async def test_cancelled_it_leaves_nothing_running_here_or_in_the_pool(gateway: str, pool: LocalPool) -> None:
    ended = Counter[str]()

    async def agent(rollout: Rollout) -> float:
        await ask(rollout)
        ended["begun"] += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended["ended"] += 1
        return 1.0

    async with running(rollouter_of(gateway, agent, concurrency=8)):
        await until(lambda: ended["begun"] == 8, "eight agents")
    assert ended["ended"] == 8
    assert pool.rules.pacing("train").in_flight == 0


async def test_a_pool_that_goes_away_is_waited_for(gateway: str, pool: LocalPool) -> None:
    async with running(rollouter_of(gateway, concurrency=4), groups=20) as run:
        await until(lambda: ready(pool) >= 2, "two groups")
        pool.away = True
        await asyncio.wait([run], timeout=0.5)
        pool.away = False
        tally = await run
    assert tally.groups == ready(pool) == 20
    assert set(tally.rollouts) <= {RolloutStatus.COMPLETED, RolloutStatus.ABORTED}


async def test_a_reader_that_fails_is_not_hidden(gateway: str) -> None:
    def on_result(result: RolloutResult) -> None:
        raise KeyError("mine")

    with pytest.raises(ExceptionGroup) as caught:
        await rollouter_of(gateway, on_result=on_result).run(groups=1)
    assert caught.value.subgroup(KeyError) is not None


async def test_progress_is_written_at_the_end_at_the_latest(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    await rollouter_of(gateway).run(groups=2)
    assert "2 groups, 8 rollouts" in capsys.readouterr().err
