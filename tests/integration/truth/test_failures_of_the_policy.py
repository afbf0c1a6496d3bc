"""T6: what the policy does wrong is trained; only a failure of the infrastructure is tried again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.outcome import AgentFailed, AgentFailure
from stepwell.agents.rollout import Rollout, RolloutResult, RolloutStatus
from stepwell.agents.rollouter import AsyncRollouter
from tests.rig.fake_engine import FakeEngine, Faults
from tests.rig.gateways import serve_gateway
from tests.rig.local_pool import LocalPool

Act = Callable[[Rollout], Awaitable[float]]
QUESTION = {"role": "user", "content": "hello"}
SHORT, LONG = 0.2, 60.0
"""Seconds for a rollout that shall take too long, and for one that shall not."""
BETWEEN = 3.0
"""Where some do and others do not."""


async def answers(rollout: Rollout) -> float:
    return 1.0


async def takes_too_long(rollout: Rollout) -> float:
    await asyncio.Event().wait()
    raise AssertionError("it is cancelled")


async def overflows(rollout: Rollout) -> float:
    await rollout.chat([QUESTION, {"role": "user", "content": "x" * 5_000}], max_tokens=2)
    raise AssertionError("the engine refuses it")


async def overflows_in_the_sdk(rollout: Rollout) -> float:
    async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5_000}])
    raise AssertionError("the engine refuses it")


async def gives_up(rollout: Rollout) -> float:
    raise AgentFailed("gave_up", "the model said nothing")


async def breaks_the_format(rollout: Rollout) -> float:
    raise AgentFailed(AgentFailure.BROKE_FORMAT)


async def cannot_read_the_answer(rollout: Rollout) -> float:
    return float("not a number")


async def scores_nan(rollout: Rollout) -> float:
    return float("nan")


async def exits(rollout: Rollout) -> float:
    raise SystemExit(1)


POLICY: Mapping[Act, AgentFailure | None] = {
    answers: None,
    takes_too_long: AgentFailure.TOO_LONG,
    overflows: AgentFailure.CONTEXT_OVERFLOW,
    overflows_in_the_sdk: AgentFailure.CONTEXT_OVERFLOW,
    gives_up: AgentFailure.GAVE_UP,
    breaks_the_format: AgentFailure.BROKE_FORMAT,
    cannot_read_the_answer: AgentFailure.ERROR,
    scores_nan: AgentFailure.ERROR,
    exits: AgentFailure.ERROR,
}
"""What a policy may do after its first answer, and how the rollout ends."""


def doing(act: Act) -> Callable[[Rollout], Awaitable[float]]:
    async def agent(rollout: Rollout) -> float:
        await rollout.chat([QUESTION], max_tokens=2)
        return await act(rollout)

    return agent


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, LocalPool, FakeEngine]]:
    pool = LocalPool()
    async with (
        FakeEngine(max_model_len=2_000) as engine,
        serve_gateway(pool, [engine.url], prompt_length=8192, response_length=256) as url,
    ):
        yield url, pool, engine


async def result_of(url: str, act: Act, rewards: Mapping[AgentFailure, float] | None = None) -> RolloutResult:
    timeout = SHORT if act is takes_too_long else LONG
    flow = BlackBoxAgentFlow(url, doing(act), group_size=1, timeout=timeout, failure_rewards=rewards or {})
    async with flow:
        return await flow.rollout({}, "p")


@pytest.mark.parametrize("act", [act for act, failure in POLICY.items() if failure is not None])
async def test_a_failure_of_the_policy_is_a_completed_rollout_with_reward_0(act: Act) -> None:
    async with served() as (url, pool, _):
        result = await result_of(url, act)
        steps = pool.taken()
    assert (result.status, result.failure, result.reward) == (RolloutStatus.COMPLETED, POLICY[act], 0.0)
    assert result.why
    assert [step.reward for step in steps] == [0.0], "its first answer is trained"


async def test_the_user_chooses_the_reward_of_a_failure_and_the_agent_overrides_it() -> None:
    async def gives_up_dearly(rollout: Rollout) -> float:
        raise AgentFailed("gave_up", reward=-3.0)

    rewards = {AgentFailure.TOO_LONG: -1.0, AgentFailure.GAVE_UP: -2.0}
    async with served() as (url, _, _):
        results = [await result_of(url, act, rewards) for act in (takes_too_long, gives_up, gives_up_dearly)]
    assert [result.reward for result in results] == [-1.0, -2.0, -3.0]


async def test_a_failure_of_the_infrastructure_is_aborted_and_tried_again() -> None:
    class SandboxLost(Exception):
        pass

    async def loses_its_sandbox(rollout: Rollout) -> float:
        if rollout.attempt == 0:
            raise SandboxLost("the container is gone")
        return 1.0

    async with served() as (url, pool, engine):
        engine.faults = Faults(error_status=500, times=2)
        flow = BlackBoxAgentFlow(url, doing(loses_its_sandbox), group_size=2, retry_on=(SandboxLost,))
        results: list[RolloutResult] = []
        rollouter = AsyncRollouter(flow, Dataset([{}], epochs=1), gateway=url, on_result=results.append)
        counts = await rollouter.run()
        steps = pool.taken()
    assert (counts.groups, counts.given_up, counts.failures) == (1, 0, {})
    aborted = [result.why for result in results if result.status is RolloutStatus.ABORTED]
    assert len(aborted) == 2
    assert [step.reward for step in steps] == [1.0, 1.0]


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(list(POLICY)), min_size=4, max_size=4))
def test_no_outcome_of_the_policy_makes_a_rollout_disappear(acts: list[Act]) -> None:
    async def run() -> None:
        waiting = list(acts)

        async def agent(rollout: Rollout) -> float:
            assert rollout.attempt == 0, "nothing is sampled again"
            act = waiting.pop()
            await rollout.chat([QUESTION], max_tokens=2)
            return await act(rollout)

        async with served() as (url, pool, _):
            flow = BlackBoxAgentFlow(url, agent, group_size=len(acts), timeout=BETWEEN)
            counts = await AsyncRollouter(flow, Dataset([{}], epochs=1), gateway=url).run()
            steps = pool.taken()
        assert (counts.groups, counts.given_up) == (1, 0)
        assert sorted(step.reward or 0.0 for step in steps) == sorted(float(POLICY[act] is None) for act in acts)
        assert counts.failures.total() == sum(POLICY[act] is not None for act in acts)

    asyncio.run(run())
