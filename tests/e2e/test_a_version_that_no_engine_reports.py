"""U1 on the real vLLM, with and without its development mode: a version that was set by hand does not stop it."""

import asyncio
import time
from pathlib import Path

import openai
import pytest

from rig.calls import get, post
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.openai_agent import agent_of
from rig.vllm_server import VllmServer, start_vllm
from rig.waiting import until
from stepwell.commands.policy import set_version
from stepwell.errors import Conflict

TOLD_WITHIN = 10.0
"""Seconds."""


async def gateway_has_told(pool: LocalPool) -> None:
    """What its engine has. Until then the pool knows of no reason to refuse a version."""
    shard = pool.transport.services[pool.plan.name].shard
    await until(
        lambda: shard.engine_reports.why_unreported(1, shard.gateways.living()) is not None,
        "the gateway tells the pool what its engine has",
        TOLD_WITHIN,
    )


async def check_versions(url: str, why: str) -> None:
    """The agent, the trainer's line that the README had, the agent again; then a version that stands, and its mend."""
    pool = LocalPool(clock=time.monotonic)
    async with serve_gateway(pool, [url]) as gateway, agent_of(gateway) as agent:
        await agent.ask()
        await gateway_has_told(pool)
        with pytest.raises(Conflict, match=f"no engine reports version 1: {url} has the weights that it was started"):
            await pool.set_policy_version(1)
        await agent.ask()
        await pool.set_policy_version(1, check=False)
        async with asyncio.timeout(TOLD_WITHIN):
            while (answer := await get(f"{gateway}/ready")).status != 503:
                await asyncio.sleep(0.1)
        assert why in answer.json()["missing"]["weights"]
        began = time.monotonic()
        with pytest.raises(openai.APIStatusError, match="run: stepwell policy set 0"):
            await agent.ask()
        assert time.monotonic() - began < TOLD_WITHIN
        await set_version(pool, 0)
        await agent.ask()
        await agent.complete()
    assert {step.policy_version for step in pool.taken()} == {0}


async def test_as_the_readme_starts_it(tiny_model: Path, tmp_path: Path) -> None:
    without = {"VLLM_SERVER_DEV_MODE": "0"}
    with start_vllm(tiny_model, log=tmp_path / "vllm.log", environment=without) as vllm:
        await check_versions(vllm.url, "it does not tell the version of its weights")


async def test_in_its_development_mode(vllm: VllmServer) -> None:
    label = f"{vllm.url}/update_weight_version"
    before = (await get(f"{vllm.url}/weight_info")).json()["weight_version"]
    await post(label, {"new_version": "default"})  # as it starts; other tests have changed it
    await check_versions(vllm.url, "its weights are 'default', and the pool's version is 1")
    await post(label, {"new_version": before})
