"""One rollout of a black-box agent through a real gateway: whatever the agent does, it ends as a value."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from rig.fake_engine import FakeEngine
from rig.gateways import free_port, serve_gateway
from rig.local_pool import LocalPool
from stepwell.agents.blackbox import Agent, BlackBoxAgentFlow
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import Rollout, RolloutStatus
from stepwell.errors import BadRequest
from stepwell.pool.api.producing import EndResult

HELLO: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
KEY = "a-control-key-of-the-tests"


@asynccontextmanager
async def flow_of(url: str, agent: Agent, **settings: Any) -> AsyncIterator[BlackBoxAgentFlow]:
    async with BlackBoxAgentFlow(url, agent, **{"group_size": 1, **settings}) as flow:
        yield flow


async def ask(rollout: Rollout) -> None:
    await rollout.chat(HELLO, max_tokens=4)


async def scoring(rollout: Rollout) -> float:
    await ask(rollout)
    return 0.5


async def test_an_agent_with_the_openai_package_is_recorded_with_its_reward_and_its_sample(
    gateway: str, pool: LocalPool
) -> None:
    async def agent(rollout: Rollout) -> float:
        async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": rollout.sample["question"]}]
            )
        return 0.25

    sample = {"question": "why?", "picture": object()}
    async with flow_of(gateway, agent) as flow:
        result = await flow.rollout(sample, "p", attempt=2)
    assert (result.status, result.reward, result.why) == (RolloutStatus.COMPLETED, 0.25, "")
    assert (result.prompt_uid, result.attempt, result.channel) == ("p", 2, "train")
    assert result.seconds > 0
    (step,) = pool.taken()
    assert (step.trajectory_uid, step.prompt_uid, step.reward) == (result.trajectory_uid, "p", 0.25)
    assert step.metadata == {"question": "why?"}, "what JSON cannot carry is left at home"


async def test_a_plain_function_runs_in_a_thread_of_its_own_many_at_a_time(gateway: str, pool: LocalPool) -> None:
    together = threading.Barrier(40)

    def agent(rollout: Rollout) -> float:
        together.wait(timeout=30)
        with openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        return 1.0

    async with flow_of(gateway, agent, group_size=40) as flow:
        results = await asyncio.gather(*(flow.rollout({}, "p") for _ in range(40)))
    assert {result.status for result in results} == {RolloutStatus.COMPLETED}
    assert len(pool.taken()) == 40


async def test_an_agent_that_gives_no_reward_leaves_the_rollout_unscored(gateway: str, pool: LocalPool) -> None:
    async def agent(rollout: Rollout) -> None:
        await ask(rollout)

    async with flow_of(gateway, agent) as flow:
        assert (await flow.rollout({}, "p")).reward is None
    assert [step.reward for step in pool.taken()] == [None]


async def raises(rollout: Rollout) -> float:
    await ask(rollout)
    raise ZeroDivisionError("by nothing")


async def exits(rollout: Rollout) -> float:
    await ask(rollout)
    raise SystemExit(3)


async def cancels_itself(rollout: Rollout) -> float:
    await ask(rollout)
    raise asyncio.CancelledError


async def gives_words(rollout: Rollout) -> Any:
    await ask(rollout)
    return "very good"


async def gives_nan(rollout: Rollout) -> float:
    await ask(rollout)
    return float("nan")


def raises_in_a_thread(rollout: Rollout) -> float:
    raise StopIteration


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (raises, "ZeroDivisionError: by nothing"),
        (exits, "SystemExit: 3"),
        (cancels_itself, "cancelled from within"),
        (gives_words, "it returned a str as its reward"),
        (gives_nan, "it returned nan as its reward"),
        (raises_in_a_thread, "StopIteration"),
    ],
)
async def test_an_agent_that_fails_is_a_rollout_that_failed_with_its_reason(
    gateway: str, pool: LocalPool, agent: Agent, why: str
) -> None:
    async with flow_of(gateway, agent) as flow:
        result = await flow.rollout({}, "p")
    assert result.failure is AgentFailure.ERROR
    assert why in result.why
    assert pool.rules.pacing("train").in_flight == 0


async def test_an_agent_over_its_time_that_asked_nothing_counts_with_its_reward(gateway: str, pool: LocalPool) -> None:
    async def agent(rollout: Rollout) -> float:
        await asyncio.Event().wait()
        return 1.0

    async with flow_of(gateway, agent, timeout=0.1) as flow:
        result = await flow.rollout({}, "p")
    assert (result.status, result.why) == (RolloutStatus.COMPLETED, "it took longer than 0.1 s")
    assert (result.failure, result.reward) == (AgentFailure.TOO_LONG, 0.0)
    assert pool.rules.pacing("train").in_flight == 0


async def test_a_timeout_of_the_agents_own_is_told_as_the_agents(gateway: str) -> None:
    async def agent(rollout: Rollout) -> float:
        raise TimeoutError("my tool was slow")

    async with flow_of(gateway, agent) as flow:
        assert (await flow.rollout({}, "p")).why == "TimeoutError: my tool was slow"


async def test_a_rollout_that_is_cancelled_is_aborted_in_the_pool(gateway: str, pool: LocalPool) -> None:
    running = asyncio.Event()

    async def agent(rollout: Rollout) -> float:
        running.set()
        await asyncio.Event().wait()
        return 1.0

    async with flow_of(gateway, agent) as flow:
        rollout = asyncio.create_task(flow.rollout({}, "p"))
        await running.wait()
        assert pool.rules.pacing("train").in_flight == 1
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    assert pool.rules.pacing("train").in_flight == 0


class SilentAfterCompletions(LocalPool):
    """Completes a trajectory and does not answer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_completed, self.may_answer = asyncio.Event(), asyncio.Event()

    async def complete_trajectory(
        self, trajectory_uid: str, prompt_uid: str, reward: float | None, failure: str = ""
    ) -> EndResult:
        ending = await super().complete_trajectory(trajectory_uid, prompt_uid, reward, failure)
        self.has_completed.set()
        await self.may_answer.wait()
        return ending


async def test_a_rollout_that_is_cancelled_while_it_is_completed_is_aborted_all_the_same(engine: FakeEngine) -> None:
    pool = SilentAfterCompletions()
    async with serve_gateway(pool, [engine.url]) as url, flow_of(url, scoring) as flow:
        rollout = asyncio.create_task(flow.rollout({}, "p"))
        await pool.has_completed.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        pool.may_answer.set()
    assert pool.rules.stats().channels["train"].groups == 0


async def test_an_agent_that_calls_nothing_is_an_empty_rollout(gateway: str) -> None:
    async def agent(rollout: Rollout) -> float:
        return 1.0

    async with flow_of(gateway, agent) as flow:
        result = await flow.rollout({}, "p")
    assert (result.status, result.reward) == (RolloutStatus.EMPTY, None)


async def test_a_rollout_that_the_pool_let_go_is_late(gateway: str, pool: LocalPool) -> None:
    async def agent(rollout: Rollout) -> float:
        await ask(rollout)
        pool.rules.state.drop_group(next(iter(pool.rules.state.channels["train"].groups.values())), "deadline")
        return 1.0

    async with flow_of(gateway, agent) as flow:
        result = await flow.rollout({}, "p")
    assert (result.status, result.reward) == (RolloutStatus.LATE, None)


async def test_a_gateway_that_is_not_there_is_a_failed_rollout() -> None:
    async with flow_of(f"http://127.0.0.1:{free_port()}", scoring, patience=0.2) as flow:
        result = await flow.rollout({}, "p")
    assert result.status is RolloutStatus.FAILED
    assert "could not be opened: no gateway answers at" in result.why


async def test_a_pool_that_is_away_when_a_rollout_ends_is_waited_for(gateway: str, pool: LocalPool) -> None:
    async def agent(rollout: Rollout) -> float:
        pool.away = True
        asyncio.get_running_loop().call_later(0.3, setattr, pool, "away", False)
        raise ConnectionError

    async with flow_of(gateway, agent) as flow:
        result = await flow.rollout({}, "p")
    assert result.status is RolloutStatus.ABORTED
    assert pool.rules.pacing("train").in_flight == 0


@asynccontextmanager
async def hanging_up_on_completions(url: str) -> AsyncIterator[str]:
    """The gateway at `url`, as if it died whenever a rollout is completed."""
    async with aiohttp.ClientSession(url) as onward:

        async def handle(request: web.Request) -> web.Response:
            if request.path.endswith("complete_trajectory"):
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            async with onward.request(request.method, request.path_qs, json=await request.json()) as answer:
                return web.json_response(await answer.json(), status=answer.status)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
        yield f"http://127.0.0.1:{port}"
        await runner.cleanup()


async def test_a_rollout_whose_gateway_dies_before_confirming_its_last_steps_is_aborted(
    gateway: str, pool: LocalPool
) -> None:
    async with hanging_up_on_completions(gateway) as url, flow_of(url, given_up_by_the_gateway) as flow:
        result = await flow.rollout({}, "p")
    assert result.status is RolloutStatus.ABORTED
    assert "its last steps may be lost: no gateway answers" in result.why
    assert pool.rules.pacing("train").queued == 0


async def given_up_by_the_gateway(rollout: Rollout) -> float:
    await rollout.chat(HELLO, model="tiny", max_tokens=4)
    return 1.0


async def test_a_wrong_key_is_said_at_once_and_a_right_one_reaches_the_agent_as_its_own(
    pool: LocalPool, engine: FakeEngine
) -> None:
    keys: list[str] = []

    async def agent(rollout: Rollout) -> float:
        keys.append(rollout.api_key)
        return await scoring(rollout)

    async with serve_gateway(pool, [engine.url], control_keys=[KEY]) as url:
        async with flow_of(url, agent, key="wrong") as flow:
            result = await flow.rollout({}, "p")
            assert result.status is RolloutStatus.FAILED
            assert "or a control key" in result.why
        async with flow_of(url, agent, key=KEY) as flow:
            assert (await flow.rollout({}, "p")).status is RolloutStatus.COMPLETED
    assert keys != [KEY]


async def test_a_flow_that_is_not_open_says_how_to_open_it() -> None:
    flow = BlackBoxAgentFlow("http://127.0.0.1:1", scoring)
    result = await flow.rollout({}, "p")
    assert "async with" in result.why
    with pytest.raises(BadRequest, match="async with"):
        await flow.gateway.model()


async def test_rollouts_of_one_prompt_form_a_group(gateway: str, pool: LocalPool) -> None:
    async with flow_of(gateway, scoring, group_size=3, channel="elsewhere") as flow:
        await asyncio.gather(*(flow.rollout({}, "p") for _ in range(3)))
    steps: Sequence[Any] = pool.taken("elsewhere")
    assert len({step.trajectory_uid for step in steps}) == 3
