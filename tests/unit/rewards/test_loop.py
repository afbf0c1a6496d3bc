import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rig.builders import make_step
from rig.waiting import until
from stepwell.pool.api.scoring import JudgementOutcome, Score
from stepwell.rewards.runner.runner import RewardRunner
from stepwell.rewards.worker import MOST_HELD, HoldingPace, RewardLoop
from stepwell.steps.step import Step
from tests.unit.rewards.samples import job
from tests.unit.rewards.scoring_pool import ScoringPool


def trajectory(uid: str, way: str = "fine", steps: int = 1) -> list[Step]:
    return [make_step(uid, f"p-{uid}", step_index=n, metadata={"way": way}) for n in range(steps)]


@asynccontextmanager
async def looping(
    pool: ScoringPool, *, lease: float | None = None, retry_pause: float = 1.0, **terms: Any
) -> AsyncIterator[None]:
    async with RewardRunner(job(**terms)) as runner:
        running = asyncio.create_task(RewardLoop(runner, pool, lease=lease, retry_pause=retry_pause).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])


async def scores(pool: ScoringPool, count: int) -> None:
    await until(lambda: len(pool.scores) == count, f"{count} scores")


async def test_everything_is_scored_once_in_few_messages() -> None:
    pool = ScoringPool([trajectory(f"t{n}") for n in range(2_000)])
    async with looping(pool):
        await until(lambda: not pool.unscored, "every trajectory to be scored")
    assert set(pool.counted.values()) == {1}
    assert len(pool.scores) == 2_000
    assert pool.takes < 200
    assert pool.gives < 200


async def test_a_judgement_says_whose_it_is_and_what_came_of_it() -> None:
    pool = ScoringPool([trajectory("good", "whole"), trajectory("bad", "raise"), trajectory("short", "short", 3)])
    async with looping(pool):
        await until(lambda: not pool.unscored, "every trajectory to be judged")
    good = pool.scores["good"]
    assert (good.prompt_uid, good.source) == ("p-good", "graders.py:graded")
    assert good.attempt.score == Score(0.5, {"style": 1.0, "facts": 1.0}, (0.25,), "well done")
    assert {(j.trajectory_uid, j.attempt.outcome, j.attempt.score) for j in pool.failures} == {
        ("bad", JudgementOutcome.ERROR, None),
        ("short", JudgementOutcome.ERROR, None),
    }


async def test_what_comes_later_is_scored_while_a_call_without_end_is_waited_for() -> None:
    pool = ScoringPool([trajectory("endless", "loop")])
    async with looping(pool, timeout=10.0):
        for n in range(20):
            pool.put(trajectory(f"t{n}"))
            await scores(pool, n + 1)
        assert pool.unscored == 1
        assert "endless" not in pool.scores


async def test_a_pool_that_is_away_is_waited_for_and_nothing_is_lost() -> None:
    pool = ScoringPool([trajectory(f"t{n}") for n in range(100)])
    async with looping(pool, retry_pause=0.01):
        await until(lambda: bool(pool.takes), "the first trajectories to be taken")
        pool.away = True
        await until(lambda: pool.refused > 2, "the pool to be asked in vain")
        pool.away = False
        await until(lambda: not pool.unscored, "every trajectory to be scored")
    assert set(pool.counted.values()) == {1}


async def test_what_is_not_scored_within_its_lease_is_left_to_the_next() -> None:
    pool = ScoringPool([trajectory("slow", "loop")])
    async with looping(pool, lease=1.0, timeout=4.0):
        await until(lambda: pool.takes >= 2, "a second lease")
    assert pool.gives == 0


def test_a_worker_holds_as_much_as_it_scores_in_a_second() -> None:
    pace = HoldingPace(slots=2)
    assert pace.room() == 2
    pace.take(2)
    assert pace.room() == 0
    now = 100.0
    pace.finish(2, now)
    for _ in range(100):
        taken = pace.room()
        pace.take(taken)
        pace.finish(taken, now := now + 0.05)
    assert 1_000 < pace.room() <= MOST_HELD


def test_a_worker_whose_function_becomes_slow_takes_little() -> None:
    pace = HoldingPace(slots=2)
    pace.take(500)
    pace.finish(500, 100.0)
    pace.take(1)
    pace.finish(1, 130.0)
    assert pace.room() <= 20
    pace.take(1)
    pace.finish(1, 135.0)
    assert pace.room() == 2
