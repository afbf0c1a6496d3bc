"""T3: the sampling that wrote an environment's tokens is recorded, from the call to the step in the pool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from stepwell.steps.trainable import PROCESSED, RAW, UNKNOWN_MODE

from rig.atropos.server import scored_group, serve_atropos
from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.envs import APIServerConfig, ServerManager, gather

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@asynccontextmanager
async def servers_behind(kind: str, engine: FakeEngine) -> AsyncIterator[ServerManager]:
    async with serve_gateway(LocalPool(), [engine.url]) as gateway:
        base_url = f"{engine.url}/v1" if kind == "vllm" else f"{gateway}/unrecorded/v1"
        servers = ServerManager([APIServerConfig(base_url=base_url, model_name="tiny")])
        try:
            yield servers
        finally:
            await servers.close()


@pytest.mark.parametrize("kind", ["vllm", "gateway"])
@pytest.mark.parametrize(("asked", "temperature"), [({"temperature": 0.7}, 0.7), ({}, 1.0)])
async def test_a_sequence_knows_the_temperature_that_the_engine_was_asked_for(
    kind: str, asked: dict[str, Any], temperature: float
) -> None:
    async with FakeEngine() as engine, servers_behind(kind, engine) as servers:
        async with servers.managed_server() as session:
            await session.chat_completion(**ASKED, **asked)
            (node,) = session.get_state()["nodes"]
        body = engine.requests[-1].body
    assert (body["temperature"], body["top_p"]) == (temperature, 1.0)
    assert (node.temperature, node.untrainable) == (temperature, None)
    assert gather([node.item(1.0), node.item(0.0)])["temperatures"] == [temperature] * 2


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [(RAW, ["raw_logprobs", None]), (UNKNOWN_MODE, ["unknown_logprobs", None]), (PROCESSED, [None, None])],
)
async def test_raw_log_probabilities_at_another_temperature_are_not_trained(mode: str, kinds: list[str | None]) -> None:
    async with FakeEngine() as engine, servers_behind("vllm", engine) as servers:
        engine.logprobs_mode = mode
        found = []
        for temperature in (0.7, 1.0):
            async with servers.managed_server() as session:
                await session.chat_completion(**ASKED, temperature=temperature)
                (node,) = session.get_state()["nodes"]
            found.append(node.untrainable and node.untrainable.split(":")[0])
    assert found == kinds


@pytest.mark.parametrize(
    "fields",
    [
        {"temperatures": [0.7, 0.7]},
        {"generation_params": {"temperature": 0.7, "top_p": 1.0}},
    ],
)
async def test_a_group_brings_its_sampling_into_the_pool(fields: dict[str, Any]) -> None:
    pool = LocalPool()
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/scored_data", json=scored_group(**fields))).status_code == 200
    steps = pool.taken()
    assert [step.temperature for step in steps] == [0.7, 0.7]


async def test_a_group_that_says_nothing_of_its_sampling_has_no_temperature() -> None:
    pool = LocalPool()
    async with serve_atropos(pool) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/scored_data", json=scored_group())).status_code == 200
    assert [step.temperature for step in pool.taken()] == [None, None]
