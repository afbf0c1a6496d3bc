"""Reward workers as Ray actors, over a pool that is one small actor."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from stepwell.pool.actors import start_pool

from rig.actors import pid_of, wait_until_back
from rig.builders import make_group
from rig.waiting import wait_until
from stepwell.errors import BadRequest, Conflict, NotReady, RewardFailed
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.ray_transport import RayTransport
from stepwell.rewards.client import RewardClient
from stepwell.rewards.runner.messages import Job
from stepwell.rewards.worker import RewardPlan, start_rewards
from stepwell.steps.step import Json, Step

FUNCTIONS = """
import time
from stepwell.pool.api.scoring import Score

def quick(sample):
    return 1.0

def slow(sample):
    time.sleep(0.02)
    return 1.0

def matches(sample):
    if sample.metadata.get("crash"):
        import ctypes
        ctypes.string_at(0)
    right = sample.response_text == sample.metadata["answer"]
    return Score(float(right), {"exact": float(right)}, (0.5,), f"after {sample.num_turns} turns")
"""


class ShortLeases(PoolClient):
    """What a killed worker held comes back soon."""

    async def take_unscored(
        self, count: int, *, lease: float, timeout: float, by_step: bool = False
    ) -> tuple[str, list[list[Step]]] | None:
        return await super().take_unscored(count, lease=min(lease, 2.0), timeout=timeout, by_step=by_step)


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


def plan(function: str, workers: int = 1) -> RewardPlan:
    return RewardPlan(name="rewards", workers=workers, job=Job(function=function, timeout=5.0, children=1))


def started(plan: RewardPlan, namespace: str, trajectories: int = 0) -> DataPool:
    """A pool with that many trajectories to score, and its reward workers."""
    start_pool(PoolPlan(limits=Limits(require_reward=True, max_queue_size=10_000)), namespace)
    groups = [make_group(f"p{n}", 1, reward=None) for n in range(trajectories)]
    steps = [step for made, _ in groups for step in made]
    registrations = [registration for _, made in groups for registration in made]
    if steps:
        asyncio.run(PoolClient("data_pool", namespace).submit_groups(steps, registrations))
    start_rewards(plan, partial(ShortLeases, "data_pool", namespace), namespace)
    return DataPool(PoolClient("data_pool", namespace))


def scored(pool: DataPool) -> int:
    return pool.stats().scoring.scored


def request(response: str, **fields: Any) -> RewardRequest:
    return RewardRequest(
        prompt_ids=[1],
        response_ids=[2],
        prompt_text="2+2?",
        response_text=response,
        num_turns=3,
        dataset_fields={"answer": "4", **fields},
    )


def test_workers_score_all_that_the_pool_holds(functions: str, namespace: str) -> None:
    pool = started(plan(f"{functions}:quick", workers=2), namespace, 2_000)
    wait_until(lambda: scored(pool) == 2_000, "every trajectory to be scored")
    assert pool.stats().channels["train"].ready_groups == 2_000


def test_a_killed_worker_comes_back_and_everything_is_scored_once(functions: str, namespace: str) -> None:
    pool = started(plan(f"{functions}:slow"), namespace, 300)
    wait_until(lambda: scored(pool) > 10, "the first scores")
    victim = pid_of("rewards", namespace)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: pool.stats().channels["train"].ready_groups == 300, "every trajectory to be scored")
    assert scored(pool) == 300
    wait_until_back("rewards", namespace, victim)


async def test_a_gateways_question_is_answered_by_the_same_function(functions: str, namespace: str) -> None:
    started(plan(f"{functions}:matches"), namespace)
    client = RewardClient("rewards", namespace, RayTransport(namespace))
    info: dict[str, Json] = {"parts": {"exact": 1.0}, "step_rewards": [0.5], "notes": "after 3 turns"}
    assert await client.compute_reward(request("4<|im_end|>")) == RewardScore(1.0, info)
    assert (await client.compute_reward(request("5"))).reward_score == 0.0
    with pytest.raises(RewardFailed, match="functions.py:matches: error: it died: signal 11"):
        await client.compute_reward(request("4", crash=True))
    assert (await client.compute_reward(request("4"))).reward_score == 1.0


async def test_a_gateways_question_waits_for_a_worker_that_restarts(functions: str, namespace: str) -> None:
    started(plan(f"{functions}:matches"), namespace)
    client = RewardClient("rewards", namespace, RayTransport(namespace))
    os.kill(await asyncio.to_thread(pid_of, "rewards", namespace), signal.SIGKILL)
    assert (await client.compute_reward(request("4"))).reward_score == 1.0


async def test_a_function_that_cannot_be_had_is_told_to_who_starts_the_workers(functions: str, namespace: str) -> None:
    with pytest.raises(BadRequest, match="has no 'missing'; its functions are: matches, quick, slow"):
        started(plan(f"{functions}:missing"), namespace)
    with pytest.raises(NotReady, match="no reward worker named 'rewards'"):
        await RewardClient("rewards", namespace, RayTransport(namespace)).check()


def test_workers_that_are_there_keep_to_their_plan(functions: str, namespace: str) -> None:
    first = plan(f"{functions}:quick")
    started(first, namespace)
    again = start_rewards(plan(f"{functions}:slow"), partial(PoolClient, "data_pool", namespace), namespace)
    assert again == first


def test_no_worker_is_added_to_those_that_have_another_function(functions: str, namespace: str) -> None:
    started(plan(f"{functions}:quick"), namespace)
    more = plan(f"{functions}:slow", workers=2)
    with pytest.raises(Conflict, match="'rewards' has .*:quick.* end each of these first"):
        start_rewards(more, partial(PoolClient, "data_pool", namespace), namespace)
    with pytest.raises(ValueError, match="rewards-1"):
        ray.get_actor("rewards-1", namespace)
    ray.kill(ray.get_actor("rewards", namespace))
    assert start_rewards(more, partial(PoolClient, "data_pool", namespace), namespace) == more


def test_workers_of_the_same_function_can_be_added(functions: str, namespace: str) -> None:
    first, more = plan(f"{functions}:quick"), plan(f"{functions}:quick", workers=2)
    started(first, namespace)
    assert start_rewards(more, partial(PoolClient, "data_pool", namespace), namespace) == first
    assert pid_of("rewards-1", namespace) != pid_of("rewards", namespace)
