"""T11: a step names the model that wrote it, an agent cannot switch models, and steps of other models are left out.

Before, the agent's `model` chose between all models and adapters of the engine, and what they wrote was trained.
"""

from typing import Any

import openai
import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import HELLO, agent_of


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_may_name_the_trained_model_only(pool: LocalPool, engine: FakeEngine, stream: bool) -> None:
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        before = engine.asked["/v1/chat/completions"]
        with pytest.raises(openai.NotFoundError, match="model `adapter` does not exist here; this gateway serves tiny"):
            await agent.ask(model="adapter", stream=stream)
        assert engine.asked["/v1/chat/completions"] == before
        await agent.ask(model="tiny", stream=stream)
        await agent.complete()
    assert [step.model for step in pool.taken()] == ["tiny"]


async def test_another_model_that_is_allowed_answers_and_its_step_is_left_out(
    pool: LocalPool, engine: FakeEngine
) -> None:
    gateway = serve_gateway(pool, [engine.url], trained_model="policy", other_models=("tiny",))
    async with gateway as url, agent_of(url) as agent:
        await agent.ask(model="tiny")
        await agent.complete()
    (step,) = pool.taken()
    assert (step.model, step.untrainable) == ("tiny", "model: tiny wrote it, and policy is trained")


async def test_an_unrecorded_call_may_name_any_model_or_the_default(pool: LocalPool, engine: FakeEngine) -> None:
    gateway = serve_gateway(pool, [engine.url], other_models=("another",))
    unrecorded: Any = {"api_key": "none", "max_retries": 0}
    async with gateway as url, openai.AsyncOpenAI(base_url=f"{url}/unrecorded/v1", **unrecorded) as client:
        for model in ("tiny", "default"):
            answer = await client.chat.completions.create(**{**HELLO, "model": model})
            (choice,) = answer.model_dump()["choices"]
            assert (answer.model, choice["untrainable"]) == ("tiny", None)


async def test_a_plain_server_may_be_asked_for_any_of_its_models(pool: LocalPool) -> None:
    async with FakeEngine(plain=True) as engine, serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        with pytest.raises(openai.NotFoundError, match="Valid aliases"):
            await agent.ask(model="another")


async def test_a_step_that_was_cut_short_names_its_model(pool: LocalPool, engine: FakeEngine) -> None:
    engine.faults = Faults(disconnect_at_token=2)
    async with serve_gateway(pool, [engine.url]) as url, agent_of(url) as agent:
        with pytest.raises(openai.APIError):
            await agent.ask(stream=True, max_tokens=8)
        await agent.complete()
    (shard,) = pool.transport.services.values()
    assert [step.model for step in shard.pool.state.quarantine] == ["tiny"]
