import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from stepwell.pool.api.scoring import JudgementOutcome, Score
from stepwell.rewards.loop import MOST_HELD, HoldingPace, RewardLoop
from stepwell.rewards.sandbox.runner import RewardRunner
from stepwell.steps.step import Step
from tests.builders import make_step
from tests.rig.scoring_port import MemoryScoringPort
from tests.rig.waiting import until
from tests.unit.rewards.samples import job


def trajectory(uid: str, way: str = "fine", steps: int = 1) -> list[Step]:
    return [make_step(uid, f"p-{uid}", step_index=n, metadata={"way": way}) for n in range(steps)]


@asynccontextmanager
async def looping(
    port: MemoryScoringPort, *, lease: float | None = None, retry_pause: float = 1.0, **terms: Any
) -> AsyncIterator[None]:
    async with RewardRunner(job(**terms)) as runner:
        running = asyncio.create_task(RewardLoop(runner, port, lease=lease, retry_pause=retry_pause).run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])


async def scores(port: MemoryScoringPort, count: int) -> None:
    await until(lambda: len(port.scores) == count, f"{count} scores")


async def test_everything_is_scored_once_in_few_messages() -> None:
    port = MemoryScoringPort([trajectory(f"t{n}") for n in range(2_000)])
    async with looping(port):
        await until(lambda: not port.waiting, "every trajectory to be scored")
    assert set(port.counted.values()) == {1}
    assert len(port.scores) == 2_000
    assert port.takes < 200
    assert port.gives < 200


async def test_a_judgement_says_whose_it_is_and_what_came_of_it() -> None:
    port = MemoryScoringPort([trajectory("good", "whole"), trajectory("bad", "raise"), trajectory("short", "short", 3)])
    async with looping(port):
        await until(lambda: not port.waiting, "every trajectory to be judged")
    good = port.scores["good"]
    assert (good.prompt_uid, good.source) == ("p-good", "graders.py:graded")
    assert good.score == Score(0.5, {"style": 1.0, "facts": 1.0}, (0.25,), "well done")
    assert {(j.trajectory_uid, j.outcome, j.score) for j in port.failures} == {
        ("bad", JudgementOutcome.ERROR, None),
        ("short", JudgementOutcome.ERROR, None),
    }


async def test_what_comes_later_is_scored_while_a_call_without_end_is_waited_for() -> None:
    port = MemoryScoringPort([trajectory("endless", "loop")])
    async with looping(port, timeout=10.0):
        for n in range(20):
            port.put(trajectory(f"t{n}"))
            await scores(port, n + 1)
        assert list(port.waiting) == ["endless"]


async def test_a_pool_that_is_away_is_waited_for_and_nothing_is_lost() -> None:
    port = MemoryScoringPort([trajectory(f"t{n}") for n in range(100)])
    async with looping(port, retry_pause=0.01):
        await until(lambda: bool(port.takes), "the first trajectories to be taken")
        port.is_down = True
        await until(lambda: port.refused > 2, "the pool to be asked in vain")
        port.is_down = False
        await until(lambda: not port.waiting, "every trajectory to be scored")
    assert set(port.counted.values()) == {1}


async def test_what_is_not_scored_within_its_lease_is_left_to_the_next() -> None:
    port = MemoryScoringPort([trajectory("slow", "loop")], longest_lease=1.0)
    async with looping(port, lease=1.0, timeout=4.0):
        await until(lambda: port.takes >= 2, "a second lease")
    assert port.gives == 0


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
