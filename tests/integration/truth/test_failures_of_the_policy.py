"""T6: what the policy does wrong is trained; only a failure of the infrastructure is tried again."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.vocabulary import encode
from rig.waiting import until
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.outcome import AgentFailed, AgentFailure
from stepwell.agents.rollout import Rollout, RolloutResult, RolloutStatus
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.pool.client.batch import batch_of
from stepwell.steps.columns import unpack

Act = Callable[[Rollout], Awaitable[float]]
QUESTION = {"role": "user", "content": "hello"}
SHORT, LONG = 0.2, 60.0
"""Seconds for a rollout that shall take too long, and for one that shall not."""
BETWEEN = 3.0
"""Where some do and others do not."""
SAID = "once upon a time " * 20
LONG_ANSWER, TOKEN_DELAY = 250, 0.05
"""Tokens, and seconds for each: longer than BETWEEN."""


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


async def writes_for_too_long(rollout: Rollout) -> float:
    await rollout.chat([QUESTION], max_tokens=LONG_ANSWER, ignore_eos=True)
    raise AssertionError("it is cancelled")


async def streams_for_too_long(rollout: Rollout) -> float:
    async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=LONG_ANSWER,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            pass
    raise AssertionError("it is cancelled")


async def fails_before_it_asks(rollout: Rollout) -> float:
    raise KeyError("answer")


AT_ONCE: Mapping[Act, AgentFailure | None] = {
    writes_for_too_long: AgentFailure.TOO_LONG,
    streams_for_too_long: AgentFailure.TOO_LONG,
    overflows: AgentFailure.CONTEXT_OVERFLOW,
    fails_before_it_asks: AgentFailure.ERROR,
}
"""How a rollout may end without a complete answer."""


def doing(act: Act) -> Callable[[Rollout], Awaitable[float]]:
    async def agent(rollout: Rollout) -> float:
        await rollout.chat([QUESTION], max_tokens=2)
        return await act(rollout)

    return agent


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, LocalPool, FakeEngine]]:
    pool = LocalPool(clock=time.time)
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


@pytest.mark.parametrize("act", list(AT_ONCE))
async def test_a_policy_that_fails_before_its_first_answer_ends_is_not_tried_again(act: Act) -> None:
    async with served() as (url, pool, engine):
        engine.faults = Faults(token_delay_s=TOKEN_DELAY)
        flow = BlackBoxAgentFlow(url, act, group_size=2, timeout=0.5, failure_rewards=dict.fromkeys(AgentFailure, -1.0))
        async with flow:
            result = await flow.rollout({}, "p")
        assert (result.status, result.failure, result.reward) == (RolloutStatus.COMPLETED, AT_ONCE[act], -1.0)
        async with BlackBoxAgentFlow(url, doing(answers), group_size=2, timeout=LONG) as second:
            assert (await second.rollout({}, "p")).is_completed
        leased = pool.rules.lease(1)
        assert leased is not None, "the group has both rollouts"
        batch = batch_of(leased[1])
    assert sorted(batch.whole_groups().returns_T.tolist()) == [-1.0, 1.0]


async def test_what_was_streamed_of_an_answer_that_took_too_long_is_trained() -> None:
    async with served() as (url, pool, engine):
        engine.faults = Faults(token_delay_s=TOKEN_DELAY)
        engine.replies.append(Reply(SAID))
        async with BlackBoxAgentFlow(url, streams_for_too_long, group_size=2, timeout=1.0) as flow:
            result = await flow.rollout({}, "p")
        await until(lambda: pool.rules.stats().channels["train"].held.steps == 1, "the step that was cut short")
        columns, _ = pool.rules.view.read([(result.trajectory_uid, "p")])
    (step,) = unpack(columns, copy=True)
    assert (step.finish_reason, step.quarantine, step.reward) == ("cut_short", None, 0.0)
    assert step.response_logprobs is not None
    assert 0 < len(step.response_ids) == len(step.response_logprobs) < LONG_ANSWER
    assert step.response_ids.tolist() == encode(SAID)[: len(step.response_ids)]


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from([*POLICY, *AT_ONCE]), min_size=3, max_size=3))
def test_no_outcome_of_the_policy_makes_a_rollout_disappear(drawn: list[Act]) -> None:
    async def run() -> None:
        acts = [answers, *drawn]
        waiting = list(acts)

        async def agent(rollout: Rollout) -> float:
            assert rollout.attempt == 0, "nothing is sampled again"
            act = waiting.pop()
            return await (act if act in AT_ONCE else doing(act))(rollout)

        async with served() as (url, pool, engine):
            engine.faults = Faults(token_delay_s=TOKEN_DELAY)
            flow = BlackBoxAgentFlow(url, agent, group_size=len(acts), timeout=BETWEEN)
            counts = await AsyncRollouter(flow, Dataset([{}], epochs=1), gateway=url).run()
            leased = pool.rules.lease(1)
            assert leased is not None
            returns = batch_of(leased[1]).whole_groups().returns_T
        outcomes = {**AT_ONCE, **POLICY}
        assert (counts.groups, counts.given_up) == (1, 0)
        assert sorted(returns.tolist()) == sorted(float(outcomes[act] is None) for act in acts)
        assert counts.failures.total() == sum(outcomes[act] is not None for act in acts)

    asyncio.run(run())
