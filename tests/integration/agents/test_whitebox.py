"""A white-box agent through a real gateway: it samples from ids, builds its steps and submits them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.agents.rollout import Rollout, RolloutStatus
from stepwell.agents.whitebox import AgentFlowBase, Generation
from stepwell.errors import BadRequest, Conflict
from stepwell.pool.api.scoring import RewardRequest, RewardScore
from stepwell.steps.step import Exactness


class TwoTurns(AgentFlowBase):
    async def run(self, rollout: Rollout) -> float:
        first = await self.generate([1, 2, 3], {"temperature": 0.7, "max_tokens": 4})
        second = await self.generate([*first.prompt_ids, *first.token_ids, 9], {"max_tokens": 3})
        await self.submit([self.step(rollout, 0, first), self.step(rollout, 1, second, extras={"turn": 2})])
        self.made = [first, second]
        return 0.75

    made: Sequence[Generation] = ()


class Reading:
    """A tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        return f"{len(ids)} tokens"


class Worker:
    """A reward worker, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[RewardRequest] = []

    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        self.asked.append(request)
        return RewardScore(0.125, {"why": "so"})

    async def check(self) -> None:
        pass


async def test_its_steps_are_what_was_generated_and_have_the_reward_of_the_run(gateway: str, pool: LocalPool) -> None:
    flow = TwoTurns(gateway, group_size=1)
    async with flow:
        result = await flow.rollout({"task": 7}, "p")
    assert (result.status, result.reward) == (RolloutStatus.COMPLETED, 0.75)
    steps = pool.taken()
    for step, made in zip(steps, flow.made, strict=True):
        assert step.prompt_ids.tolist() == made.prompt_ids
        assert step.response_ids.tolist() == made.token_ids
        assert step.response_logprobs is not None
        assert step.response_logprobs.tolist() == pytest.approx(made.log_probs)
        assert step.finish_reason == made.stop_reason
        assert step.model == made.model != ""
        assert step.exactness is Exactness.SUBMITTED
        assert step.metadata == {"task": 7}
    assert (steps[0].temperature, steps[0].sampling["max_tokens"]) == (0.7, 4)
    assert steps[1].extras == {"turn": 2}
    assert [(step.step_index, step.reward, step.is_last) for step in steps] == [(0, None, False), (1, 0.75, True)]


async def test_the_weights_that_wrote_its_tokens_are_told_to_the_pool(
    gateway: str, pool: LocalPool, engine: FakeEngine
) -> None:
    engine.weight_version = "5"
    async with TwoTurns(gateway, group_size=1) as flow:
        await flow.rollout({}, "p")
    assert [(step.policy_version, len(step.version_spans)) for step in pool.taken()] == [(5, 1), (5, 1)]


async def test_a_reward_worker_sees_the_tokens_and_the_sample(pool: LocalPool, engine: FakeEngine) -> None:
    class Asking(AgentFlowBase):
        async def run(self, rollout: Rollout) -> float:
            made = await self.generate([1, 2], {"max_tokens": 3})
            await self.submit([self.step(rollout, 0, made)])
            return (await self.compute_reward(rollout, made, num_turns=2)).reward_score

    worker = Worker()
    async with (
        serve_gateway(pool, [engine.url], rewards=worker, load_tokenizer=lambda _: Reading()) as url,
        Asking(url, group_size=1) as flow,
    ):
        result = await flow.rollout({"answer": "42"}, "p")
    assert (result.reward, result.why) == (0.125, "")
    (asked,) = worker.asked
    assert (asked.prompt_ids, asked.num_turns, asked.dataset_fields) == ([1, 2], 2, {"answer": "42"})


async def test_steps_that_the_pool_does_not_take_fail_the_rollout(gateway: str, pool: LocalPool) -> None:
    class Misplacing(AgentFlowBase):
        async def run(self, rollout: Rollout) -> None:
            made = await self.generate([1, 2], {"max_tokens": 3})
            await self.submit([self.step(replace(rollout, prompt_uid="another"), 0, made)])

    async with Misplacing(gateway, group_size=1) as flow:
        result = await flow.rollout({}, "p")
    assert result.status is RolloutStatus.ABORTED
    assert f"{Conflict.__name__}: the pool refused steps: 1 unknown" in result.why


async def test_a_step_that_was_submitted_already_is_no_conflict(gateway: str, pool: LocalPool) -> None:
    class Insisting(AgentFlowBase):
        async def run(self, rollout: Rollout) -> None:
            step = self.step(rollout, 0, await self.generate([1, 2], {"max_tokens": 3}))
            await self.submit([step])
            await self.submit([step])

    async with Insisting(gateway, group_size=1) as flow:
        assert (await flow.rollout({}, "p")).status is RolloutStatus.COMPLETED
    assert len(pool.taken()) == 1


async def test_what_cannot_be_asked_is_said_before_it_is_sent(gateway: str) -> None:
    async with TwoTurns(gateway) as flow:
        with pytest.raises(BadRequest, match="prompt_ids"):
            await flow.generate([])
