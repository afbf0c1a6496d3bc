"""The whole way of a reward on real Ray: complete in the pool, scored by a worker, out in a batch."""

import os
import signal
from pathlib import Path

import pytest

from rig.actors import pid_of, wait_until_back
from rig.waiting import wait_until
from stepwell.pool.api.plan import OnRewardFailure
from tests.integration.rewards.rollouts import WORKERS, Scored, written

FUNCTIONS = """
import time
from stepwell.pool.api.scoring import Score

def slow(sample):
    time.sleep(0.01)
    return float(sample.metadata["number"])

def explained(sample):
    return Score(0.75, {"style": 0.5, "facts": 1.0}, notes=f"{sample.num_turns} turns")

def each_step(sample):
    return Score(3.0, step_rewards=(1.0, 2.0))

def sometimes_loops(sample):
    while sample.metadata["number"] % 10 == 7:
        pass
    time.sleep(0.01)
    return 1.0

def fails(sample):
    raise ValueError("cannot read this")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    return written(tmp_path, FUNCTIONS)


def test_all_is_scored_once_though_a_worker_is_killed_under_load(namespace: str, functions: str) -> None:
    scored = Scored(namespace, shards=2, group_size=4)
    scored.work(f"{functions}:slow", children=1, longest_lease=4.0)
    scored.put(600, group_size=4)
    wait_until(lambda: scored.scoring.scored > 50, "the first scores")
    victim = pid_of(WORKERS, namespace)
    os.kill(victim, signal.SIGKILL)
    assert scored.scoring.scored < 600, "it was killed too late to be under load"
    scored.put(200, first=600, group_size=4)
    batch = scored.pool.fetch_batch(200, timeout=120.0)
    wait_until_back(WORKERS, namespace, victim)
    rewards = {step.trajectory_uid: step.reward for step in batch.steps()}
    assert rewards == {f"t{number}": number for number in range(800)}
    assert {step.reward_revision for step in batch.steps()} == {1}
    stats = scored.scoring
    assert (stats.scored, stats.waiting, stats.under_way, stats.resting) == (800, 0, 0, 0)
    assert not stats.failed


def test_a_reward_reaches_the_trainer_with_its_source_and_its_parts(namespace: str, functions: str) -> None:
    scored = Scored(namespace)
    scored.work(f"{functions}:explained", workers=1)
    scored.put(1, turns=3, metadata={"answer": "4"})
    *early, last = scored.pool.fetch_batch(1, timeout=60.0).steps()
    assert [step.reward for step in early] == [None, None]
    assert (last.reward, last.reward_source, last.reward_revision) == (0.75, "functions.py:explained", 1)
    assert last.metadata["reward"] == {"parts": {"style": 0.5, "facts": 1.0}, "notes": "3 turns"}
    assert last.metadata["answer"] == "4"


def test_step_rewards_reach_their_steps(namespace: str, functions: str) -> None:
    scored = Scored(namespace)
    scored.work(f"{functions}:each_step", workers=1)
    scored.put(1, turns=2)
    batch = scored.pool.fetch_batch(1, timeout=60.0)
    assert [step.reward for step in batch.steps()] == [1.0, 2.0]
    assert batch.rewards_T.tolist() == [3.0]


def test_a_function_that_loops_for_one_in_ten_delays_no_other(namespace: str, functions: str) -> None:
    scored = Scored(namespace, reward_attempts=1)
    scored.work(f"{functions}:sometimes_loops", timeout=8.0, children=4)
    scored.put(30)
    wait_until(lambda: scored.scoring.scored == 27, "the other 27 scores")
    assert not scored.scoring.failed, "the others waited until those that loop were killed"
    wait_until(lambda: scored.scoring.failed == {"timeout": 3}, "those that loop to be killed")
    assert scored.pool.stats().channels["train"].dropped["reward_failed"].steps == 3
    batch = scored.pool.fetch_batch(27, timeout=60.0)
    assert {step.reward for step in batch.steps()} == {1.0}


@pytest.mark.parametrize("policy", OnRewardFailure)
def test_what_cannot_be_scored_follows_the_policy(namespace: str, functions: str, policy: OnRewardFailure) -> None:
    scored = Scored(namespace, group_size=2, reward_attempts=2, on_reward_failure=policy)
    scored.put(1, group_size=2, reward=1.0)
    scored.put(1, first=1, group_size=2)
    scored.work(f"{functions}:fails", workers=1)
    wait_until(lambda: scored.scoring.failed == {"error": 2}, "both attempts")
    channel = scored.pool.stats().channels["train"]
    dropped = {cause: tally.steps for cause, tally in channel.dropped.items()}
    assert channel.ready_groups == 0
    assert (
        dropped
        == {
            OnRewardFailure.DROP: {"reward_failed": 1},
            OnRewardFailure.DROP_GROUP: {"reward_failed": 2},
            OnRewardFailure.KEEP: {},
        }[policy]
    )
    if policy is OnRewardFailure.DROP:
        scored.put(1, first=2, group_size=2, prompt_uid="p0", reward=0.0)
        assert [step.reward for step in scored.pool.fetch_batch(1, timeout=60).steps()] == [1.0, 0.0]


def test_a_reward_that_came_with_the_completion_is_never_scored_again(namespace: str, functions: str) -> None:
    scored = Scored(namespace)
    scored.put(20, reward=-5.0)
    scored.put(20, first=20)
    scored.work(f"{functions}:slow")
    wait_until(lambda: scored.scoring.scored == 20, "the other rewards")
    given = {step.trajectory_uid: step for step in scored.pool.fetch_batch(40, timeout=60.0).steps()}
    for number in range(20):
        step = given[f"t{number}"]
        assert (step.reward, step.reward_source, step.reward_revision) == (-5.0, "completion", 1)
    assert [given[f"t{number}"].reward for number in range(20, 40)] == [float(number) for number in range(20, 40)]
    assert scored.scoring.scored == 20


def test_a_pool_shard_that_is_killed_is_scored_to_the_end(namespace: str, functions: str, tmp_path: Path) -> None:
    scored = Scored(namespace, journal=str(tmp_path / "journal"))
    scored.work(f"{functions}:slow", children=1)
    scored.put(300)
    wait_until(lambda: scored.scoring.scored > 30, "the first scores")
    os.kill(pid_of("data_pool", namespace), signal.SIGKILL)
    batch = scored.pool.fetch_batch(300, timeout=90.0)
    assert {step.trajectory_uid: step.reward for step in batch.steps()} == {f"t{n}": n for n in range(300)}
    assert {step.reward_revision for step in batch.steps()} == {1}
