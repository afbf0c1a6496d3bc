"""Claw-R1's white-box offline mode: agents submit unscored steps, and the trainer asks for their rewards."""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.pool.client.batch import Batch, make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Step
from stepwell.trainers.reporting import UpdateMetrics
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from tests.unit.trainers.models import Recurrent
from tests.unit.trainers.training_pool import TrainingPool

WANTED = 3
"""The reward function wants answers that begin with this token."""


class RewardFunction:
    asked = 0

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        self.asked += 1
        return RewardScore(float(request.response_ids[0] == request.dataset_fields["wanted"]), {})

    async def check(self) -> None: ...


class Numbers:
    """A tokenizer for the reward function, which reads ids only."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class ScoringPool(TrainingPool):
    """The pool of a trainer that asks the gateway for the reward of each rollout that it takes."""

    gateway = ""

    def fetch_batch(self, count: int, **options: Any) -> Batch:
        batch = super().fetch_batch(count, **options)
        scored = [replace(step, reward=(r := self.score(step)), trajectory_return=r) for step in batch.steps()]
        return make_batch(pack(scored), batch.group_sizes_G, opened_at=batch.opened_at_G, leases=batch.leases)

    def score(self, step: Step) -> float:
        ids = {"prompt_ids": step.prompt_ids.tolist(), "response_ids": step.response_ids.tolist()}
        asked = {**ids, "dataset_fields": dict(step.metadata)}
        return float(httpx.post(f"{self.gateway}/compute_reward", json=asked).json()["reward_score"])


@pytest.fixture
def rewards() -> RewardFunction:
    return RewardFunction()


@pytest.fixture
def pool(rewards: RewardFunction) -> Iterator[ScoringPool]:
    """A pool, and a gateway over it in the same event loop."""
    pool, stack = ScoringPool(), AsyncExitStack()

    async def serve() -> str:
        engine = await stack.enter_async_context(FakeEngine())
        gateway = serve_gateway(pool.local, [engine.url], rewards=rewards, load_tokenizer=lambda _: Numbers())
        return await stack.enter_async_context(gateway)

    pool.gateway = pool._run(serve())
    yield pool
    pool._run(stack.aclose())


def test_a_trainer_scores_white_box_rollouts_by_compute_reward_and_learns_from_it(
    pool: ScoringPool, rewards: RewardFunction
) -> None:
    for group in range(8):
        steps = [submitted(group, answer) for answer in (WANTED, 4, 5, 7)]
        answer = httpx.post(f"{pool.gateway}/submit_steps?group_size=4", json={"steps": steps})
        assert answer.json()["accepted"] == 4
    model, seen = Recurrent(), list[UpdateMetrics]()
    settings = Settings(groups=2, updates=4, learning_rate=1e-2, lease=60.0)
    AsyncTrainer(pool, model, settings=settings, reports=[seen.append]).run()
    assert rewards.asked == 32
    assert [metrics.reward for metrics in seen] == [0.25] * 4
    assert pool.held == 0
    assert chance_of_wanted(model) > 1.1 * chance_of_wanted(Recurrent())


def submitted(group: int, answer: int) -> dict[str, Any]:
    return {
        "prompt_ids": [0, 0],
        "response_ids": [answer, 6],
        "response_logprobs": [-2.0, -2.0],
        "temperature": 1.0,
        "reward": None,
        "trajectory_uid": f"{group}-{answer}",
        "prompt_uid": f"p{group}",
        "step_index": 0,
        "is_last": True,
        "metadata": {"wanted": WANTED},
    }


def chance_of_wanted(model: torch.nn.Module) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[0, 0]]), attention_mask=None).logits
    return float(logits[0, -1].softmax(-1)[WANTED])
