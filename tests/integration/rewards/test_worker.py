"""Reward workers as Ray actors, over a pool that is one small actor."""

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from stepwell.errors import BadRequest, Conflict, NotReady, RewardFailed
from stepwell.pool.api.scoring import Judgement, RewardRequest, RewardScore
from stepwell.rewards.client import RewardClient
from stepwell.rewards.sandbox.messages import Job
from stepwell.rewards.worker import RewardPlan, start_rewards
from stepwell.steps.step import Json, Step
from tests.builders import make_step
from tests.rig.scoring_port import MemoryScoringPort
from tests.rig.waiting import wait_until

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


class PortActor(MemoryScoringPort):
    def left(self) -> int:
        return len(self.waiting)

    def tally(self) -> dict[str, int]:
        return dict(self.counted)


class ActorPort:
    """The way to a PortActor."""

    def __init__(self, namespace: str) -> None:
        self._actor: Any = ray.get_actor("port", namespace)

    async def take_unscored(self, count: int, *, lease: float, timeout: float) -> tuple[str, list[list[Step]]] | None:
        taken: tuple[str, list[list[Step]]] | None = await self._actor.take_unscored.remote(
            count, lease=lease, timeout=timeout
        )
        return taken

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        counted: list[bool] = await self._actor.give_judgements.remote(judgements)
        return counted

    async def check(self) -> None:
        await self._actor.check.remote()


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


def plan(function: str, workers: int = 1) -> RewardPlan:
    return RewardPlan(name="rewards", workers=workers, job=Job(function=function, timeout=5.0, children=1))


def started(plan: RewardPlan, namespace: str, trajectories: int = 0, longest_lease: float = 60.0) -> Any:
    """The pool's actor."""
    held = [[make_step(f"t{n}", f"p{n}")] for n in range(trajectories)]
    made: Any = ray.remote(PortActor).options(name="port", namespace=namespace, lifetime="detached", num_cpus=0)
    actor = made.remote(held, longest_lease=longest_lease)
    ray.get(actor.left.remote())
    start_rewards(plan, partial(ActorPort, namespace), namespace)
    return actor


def pid_of(worker: str, namespace: str) -> int:
    actor: Any = ray.get_actor(worker, namespace)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def left(port: Any) -> int:
    return int(ray.get(port.left.remote()))


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
    port = started(plan(f"{functions}:quick", workers=2), namespace, 2_000)
    wait_until(lambda: left(port) == 0, "every trajectory to be scored")
    assert ray.get(port.tally.remote()) == {f"t{n}": 1 for n in range(2_000)}


def test_a_killed_worker_comes_back_and_everything_is_scored_once(functions: str, namespace: str) -> None:
    port = started(plan(f"{functions}:slow"), namespace, 300, longest_lease=2.0)
    wait_until(lambda: left(port) < 290, "the first scores")
    victim = pid_of("rewards", namespace)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: left(port) == 0, "every trajectory to be scored", timeout=60.0)
    assert ray.get(port.tally.remote()) == {f"t{n}": 1 for n in range(300)}
    assert pid_of("rewards", namespace) != victim


async def test_a_gateways_question_is_answered_by_the_same_function(functions: str, namespace: str) -> None:
    started(plan(f"{functions}:matches"), namespace)
    client = RewardClient("rewards", namespace)
    info: dict[str, Json] = {"parts": {"exact": 1.0}, "step_rewards": [0.5], "notes": "after 3 turns"}
    assert await client.compute_reward(request("4<|im_end|>")) == RewardScore(1.0, info)
    assert (await client.compute_reward(request("5"))).reward_score == 0.0
    with pytest.raises(RewardFailed, match="functions.py:matches: error: it died: signal 11"):
        await client.compute_reward(request("4", crash=True))
    assert (await client.compute_reward(request("4"))).reward_score == 1.0


async def test_a_gateways_question_waits_for_a_worker_that_restarts(functions: str, namespace: str) -> None:
    started(plan(f"{functions}:matches"), namespace)
    client = RewardClient("rewards", namespace)
    os.kill(await asyncio.to_thread(pid_of, "rewards", namespace), signal.SIGKILL)
    assert (await client.compute_reward(request("4"))).reward_score == 1.0


async def test_a_function_that_cannot_be_had_is_told_to_who_starts_the_workers(functions: str, namespace: str) -> None:
    with pytest.raises(BadRequest, match="has no 'missing'; its functions are: matches, quick, slow"):
        started(plan(f"{functions}:missing"), namespace)
    with pytest.raises(NotReady, match="no reward worker named 'rewards'"):
        await RewardClient("rewards", namespace).check()


def test_workers_that_are_there_keep_to_their_plan(functions: str, namespace: str) -> None:
    first = plan(f"{functions}:quick")
    started(first, namespace)
    again = start_rewards(plan(f"{functions}:slow"), partial(ActorPort, namespace), namespace)
    assert again == first


def test_no_worker_is_added_to_those_that_have_another_function(functions: str, namespace: str) -> None:
    started(plan(f"{functions}:quick"), namespace)
    more = plan(f"{functions}:slow", workers=2)
    with pytest.raises(Conflict, match="'rewards' has .*:quick.* end each of these first"):
        start_rewards(more, partial(ActorPort, namespace), namespace)
    with pytest.raises(ValueError, match="rewards-1"):
        ray.get_actor("rewards-1", namespace)
    ray.kill(ray.get_actor("rewards", namespace))
    assert start_rewards(more, partial(ActorPort, namespace), namespace) == more


def test_workers_of_the_same_function_can_be_added(functions: str, namespace: str) -> None:
    first, more = plan(f"{functions}:quick"), plan(f"{functions}:quick", workers=2)
    started(first, namespace)
    assert start_rewards(more, partial(ActorPort, namespace), namespace) == first
    assert pid_of("rewards-1", namespace) != pid_of("rewards", namespace)
