"""Reward functions on stored trajectories, in real child processes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rig.builders import make_step
from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.pool.client.batch import Batch, batch_from_arrow, make_batch
from stepwell.rewards.offline import rescore, step_rewards, try_function
from stepwell.rewards.runner.messages import Job
from stepwell.steps.arrow import ParquetReader
from stepwell.steps.columns import pack
from stepwell.steps.step import OF_TRAJECTORY, Step

FUNCTIONS = """
import time
from stepwell.pool.api.scoring import Score

def told(sample):
    value = sample.metadata["told"]
    if value == "raise":
        raise ValueError("cannot read this")
    if value == "loop":
        time.sleep(1_000)
    if value == "slow":
        time.sleep(0.3)
        return 0.5
    return value

def each_step(sample):
    shares = tuple(1.0 for _ in sample.steps)
    return Score(float(len(shares)), {"steps": len(shares)}, shares, "one each")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def put(folder: Path, name: str, *trajectories: list[Step]) -> None:
    batch = make_batch(pack([step for steps in trajectories for step in steps]), [len(steps) for steps in trajectories])
    pq.write_table(batch.to_arrow(), folder / name)


def telling(told: object, uid: str = "t", **fields: object) -> list[Step]:
    return [make_step(uid, f"p-{uid}", step_index=0, metadata={"told": told, "kept": 1}, **fields)]


async def tried(function: str, folder: Path, *, limit: int = 20, timeout: float = 20.0) -> list[str]:
    lines: list[str] = []
    job = Job(function=function, timeout=timeout)
    try:
        await try_function(job, ParquetReader(str(folder)), limit=limit, say=lines.append)
    except RewardFailed as failure:
        lines.append(f"failed: {failure}")
    return lines


async def rescored(function: str, folder: Path, target: Path, *, timeout: float = 20.0) -> list[str]:
    lines: list[str] = []
    job = Job(function=function, timeout=timeout)
    await rescore(job, ParquetReader(str(folder)), str(target), say=lines.append)
    return lines


def batch_of(folder: Path, name: str) -> Batch:
    return batch_from_arrow(pq.read_table(folder / name))


async def test_trying_shows_what_each_trajectory_had_and_would_get(functions: str, data: Path) -> None:
    put(data, "a.parquet", telling(1, "a", reward=0.25, reward_revision=1), telling(0, "b"), telling("raise", "c"))
    head, first, second, third, end = await tried(f"{functions}:told", data)
    assert head.split() == ["trajectory", "had", "outcome", "score", "seconds"]
    assert first.split()[:4] == ["a", "0.25", "score", "1"]
    assert second.split()[:4] == ["b", "none", "score", "0"]
    assert third.split()[:3] == ["c", "none", "error"]
    assert third.endswith("ValueError: cannot read this (functions.py, line 8, in told)")
    assert end == "failed: 2 scored (mean 0.5, from 0 to 1); 1 without a score (error: 1)"


async def test_trying_shows_parts_and_notes_and_stops_at_the_limit(functions: str, data: Path) -> None:
    put(data, "a.parquet", *(telling(1, uid) for uid in "abcde"))
    _, *lines, end = await tried(f"{functions}:each_step", data, limit=2)
    assert [line.split()[0] for line in lines] == ["a", "b"]
    assert lines[0].endswith("steps 1 · one each")
    assert end == "2 scored (mean 1, from 1 to 1)"


async def test_a_slow_one_keeps_its_place_and_a_stuck_one_ends(functions: str, data: Path) -> None:
    put(data, "a.parquet", telling("slow", "a"), telling("loop", "b"), *(telling(1, f"c{n}") for n in range(9)))
    _, *lines, end = await tried(f"{functions}:told", data, timeout=1.5)
    assert [line.split()[0] for line in lines] == ["a", "b", *(f"c{n}" for n in range(9))]
    assert lines[1].split()[2] == "timeout"
    assert end.endswith("1 without a score (timeout: 1)")


async def test_a_function_that_cannot_be_had_is_refused_before_anything_is_shown(functions: str, data: Path) -> None:
    put(data, "a.parquet", telling(1))
    with pytest.raises(BadRequest, match="has no 'missing'"):
        await tried(f"{functions}:missing", data)


async def test_rescoring_changes_rewards_and_nothing_else(functions: str, data: Path, tmp_path: Path) -> None:
    old = telling(0.75, "a", reward=0.25, reward_revision=2, reward_source="old") + telling(0.75, "a")
    put(data, "a.parquet", old, telling(0, "b"))
    put(data, "b.parquet", telling(1, "c"))
    assert await rescored(f"{functions}:told", data, tmp_path / "new") == [
        *("wrote a.parquet", "wrote b.parquet"),
        "3 scored (mean 0.5833, from 0 to 1)",
    ]
    first, second, third = batch_of(tmp_path / "new", "a.parquet").steps()
    assert (first.reward, first.reward_revision, first.reward_source) == (None, 3, "functions.py:told")
    assert (second.reward, second.reward_revision, second.reward_source) == (0.75, 3, "functions.py:told")
    assert (third.reward, third.reward_revision) == (0.0, 1)
    assert [step.reward_of for step in (first, second, third)] == ["", OF_TRAJECTORY, OF_TRAJECTORY]
    rewards = ["reward", "reward_of", "reward_revision", "reward_source", "trajectory_return", "outcome_reward"]
    before, after = (pq.read_table(folder / "a.parquet") for folder in (data, tmp_path / "new"))
    assert before.drop_columns(rewards).equals(after.drop_columns(rewards), check_metadata=True)
    assert before.schema.equals(after.schema, check_metadata=True)


async def test_rescoring_with_step_rewards_and_words(functions: str, data: Path, tmp_path: Path) -> None:
    stale = {"reward": {"notes": "of another function"}, "kept": 1}
    put(data, "a.parquet", [make_step("a", step_index=n, metadata=stale, reward=9.0) for n in range(3)])
    await rescored(f"{functions}:each_step", data, tmp_path / "new")
    steps = batch_of(tmp_path / "new", "a.parquet").steps()
    assert [step.reward for step in steps] == [1.0, 1.0, 1.0]
    assert {str(step.metadata["reward"]) for step in steps} == {str({"parts": {"steps": 3.0}, "notes": "one each"})}
    assert steps[0].metadata["kept"] == 1


async def test_what_cannot_be_scored_anew_has_no_reward_and_says_why(
    functions: str, data: Path, tmp_path: Path
) -> None:
    put(data, "a.parquet", telling("raise", "a", reward=1.0, reward_revision=1), telling(1, "b"))
    with pytest.raises(RewardFailed, match=r"1 scored .*; 1 without a score \(error: 1\)"):
        await rescored(f"{functions}:told", data, tmp_path / "new")
    failed, fine = batch_of(tmp_path / "new", "a.parquet").steps()
    assert (failed.reward, failed.reward_revision) == (None, 2)
    explained = failed.metadata["reward"]
    assert isinstance(explained, dict)
    assert explained["outcome"] == "error"
    assert "cannot read this" in str(explained["why"])
    assert fine.reward == 1.0


async def test_rewards_of_two_functions_are_not_mixed_in_one_folder(functions: str, data: Path) -> None:
    put(data, "a.parquet", telling(1))
    with pytest.raises(BadRequest, match="has Parquet files already"):
        await rescored(f"{functions}:told", data, data)


@pytest.mark.parametrize(
    ("marks", "given", "rewards"),
    [
        ((None, None), (), [None, 1.0]),
        ((None, "side_call: title"), (), [1.0, None]),
        (("greedy: 0", "greedy: 0"), (), [None, 1.0]),
        ((None, None), (0.5, 0.5), [0.5, 0.5]),
        ((None, "side_call: title"), (1.0, None), [1.0, None]),
    ],
)
def test_the_rollouts_reward_stands_where_the_pool_would_put_it(
    marks: tuple[str | None, ...], given: tuple[float | None, ...], rewards: list[float | None]
) -> None:
    steps = [make_step(untrainable=mark) for mark in marks]
    assert step_rewards(steps, Score(1.0, step_rewards=given)) == rewards
    assert pa.array(step_rewards(steps, None), pa.float64()).null_count == 2
