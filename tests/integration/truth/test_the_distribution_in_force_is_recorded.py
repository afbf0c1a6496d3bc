"""T3: every step says at which temperature, with which parameters and in which log-probability mode it was sampled.

Before, only agents' calls did: white-box steps had what was asked, environments' steps nothing, and nobody asked the
engine for its mode.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from stepwell.steps.trainable import RAW, UNKNOWN_MODE

from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, agent_of
from stepwell.agents.gateway_client import GatewayClient
from stepwell.agents.whitebox import AgentFlowBase
from stepwell.engines.engine import EngineFacts, EngineHttp
from stepwell.engines.vllm import VllmEngine
from stepwell.errors import EngineUnavailable
from stepwell.wire.scored_groups import group_from_json
from stepwell.wire.scored_groups_arrow import groups_from_arrow, groups_to_arrow
from stepwell.wire.scored_groups_steps import columns_from_group

OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
async def url(pool: LocalPool, engine: FakeEngine) -> AsyncIterator[str]:
    async with serve_gateway(pool, [engine.url]) as url:
        yield url


async def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession(url) as http, http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


@pytest.mark.parametrize("stream", [False, True])
async def test_of_an_agents_call(url: str, pool: LocalPool, stream: bool) -> None:
    async with agent_of(url) as agent:
        await agent.ask(temperature=0.7, seed=3, stream=stream)
        await agent.complete()
    (step,) = pool.taken()
    assert (step.temperature, step.model) == (0.7, "tiny")
    assert {name: step.sampling[name] for name in OFF} == OFF
    assert (step.sampling["logprobs_mode"], step.sampling["seed"]) == ("processed", 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_of_an_answer_that_was_continued(url: str, pool: LocalPool, engine: FakeEngine, stream: bool) -> None:
    engine.faults = Faults(abort_at_token=5, times=1)
    engine.replies.extend([Reply("four and twenty"), Reply("and twenty")])
    async with agent_of(url) as agent:
        heard = await agent.ask(temperature=0.5, stream=stream)
        await agent.complete()
    (step,) = pool.taken()
    assert (heard.text, step.temperature, step.model) == ("four and twenty", 0.5, "tiny")


async def test_of_a_generation_and_the_step_that_is_submitted_from_it(url: str, pool: LocalPool) -> None:
    body = {"prompt_ids": [1, 2, 3], "sampling_params": {"temperature": 0.25, "max_tokens": 4}}
    done = await post(url, "/generate", body)
    assert done["temperature"] == 0.25
    assert {name: done["sampling"][name] for name in OFF} == OFF
    step = {
        "prompt_ids": [1, 2, 3],
        "response_ids": done["token_ids"],
        "response_logprobs": done["log_probs"],
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "step_index": 0,
        "is_last": True,
        "sampling": done["sampling"],
        "model": done["model"],
    }
    await post(url, "/submit_steps", {"steps": [step]})
    (recorded,) = pool.taken()
    assert (recorded.temperature, recorded.model) == (0.25, "tiny")
    assert recorded.sampling["logprobs_mode"] == "processed"


async def test_of_a_white_box_flow(url: str) -> None:
    class Flow(AgentFlowBase):
        async def run(self, rollout: Any) -> None: ...

    flow = Flow.__new__(Flow)
    async with GatewayClient(url) as flow.gateway:
        made = await flow.generate([1, 2, 3], {"max_tokens": 4})
    assert (made.temperature, made.sampling["top_p"], made.sampling["logprobs_mode"]) == (1.0, 1.0, "processed")


async def test_of_an_unrecorded_call(url: str) -> None:
    answer = await post(url, "/unrecorded/v1/chat/completions", {**HELLO, "temperature": 0.5, "top_p": 0.9})
    (choice,) = answer["choices"]
    assert (choice["temperature"], choice["untrainable"]) == (0.5, "truncated: top_p is 0.9")


def test_of_an_environments_group_by_sequence_or_for_all() -> None:
    sent = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}
    told = {"temperatures": [0.5, None], "untrainable": [None, "greedy: temperature is 0"], "models": ["tiny", "other"]}
    group = group_from_json({**sent, **told, "generation_params": {"temperature": 0.75}})
    for each in (group, *groups_from_arrow(groups_to_arrow([group]))):
        columns = columns_from_group(each, "p", source="", policy_version=0, arrived_at=0.0)
        assert columns.temperatures_S.tolist() == [0.5, 0.75]
        assert columns.untrainable == [None, "greedy: temperature is 0"]
        assert columns.models == ["tiny", "other"]
    unknown = columns_from_group(group_from_json(sent), "p", source="", policy_version=0, arrived_at=0.0)
    assert str(unknown.temperatures_S.tolist()) == "[nan, nan]"


async def test_raw_log_probabilities_at_another_temperature_are_not_trained(pool: LocalPool) -> None:
    async with FakeEngine() as engine:
        engine.logprobs_mode = RAW
        async with serve_gateway(pool, [engine.url]) as url:
            for temperature in (1.0, 0.5):
                async with agent_of(url) as agent:
                    await agent.ask(temperature=temperature)
                    await agent.complete()
    (plain,), (hot,) = pool.taken(), pool.taken()
    assert (plain.untrainable, plain.sampling["logprobs_mode"]) == (None, "raw")
    assert str(hot.untrainable).startswith("raw_logprobs: ")


async def test_log_probabilities_of_which_nobody_knows_what_they_are_are_told_as_unknown_and_not_trained(
    pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    """They counted as fine: a trainer computes its ratio with them."""
    async with FakeEngine() as engine:
        engine.logprobs_mode = UNKNOWN_MODE
        async with serve_gateway(pool, [engine.url]) as url:
            for temperature in (1.0, 0.5):
                async with agent_of(url) as agent:
                    await agent.ask(temperature=temperature)
                    await agent.complete()
            body = {"prompt_ids": [1, 2, 3], "sampling_params": {"temperature": 0.25, "max_tokens": 4}}
            done = await post(url, "/generate", body)
    (plain,), (hot,) = pool.taken(), pool.taken()
    assert (plain.untrainable, plain.sampling["logprobs_mode"]) == (None, "unknown")
    assert str(hot.untrainable).startswith("unknown_logprobs: ")
    assert done["sampling"]["logprobs_mode"] == "unknown"
    assert "does not tell whether its log-probabilities" in caplog.text


async def test_an_engine_that_has_not_answered_the_probe_yet_has_an_unknown_mode(
    pool: LocalPool, engine: FakeEngine
) -> None:
    class SlowToStart(VllmEngine):
        async def probe_sampling(self, http: EngineHttp, facts: EngineFacts) -> EngineFacts:
            raise EngineUnavailable("no answer within 5 s")

    async with serve_gateway(pool, [engine.url], kinds=[SlowToStart()]) as url, agent_of(url) as agent:
        await agent.ask(temperature=0.5)
        await agent.complete()
    (step,) = pool.taken()
    assert step.sampling["logprobs_mode"] == "unknown"
    assert str(step.untrainable).startswith("unknown_logprobs: ")
