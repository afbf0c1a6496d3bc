"""What other systems demand of an endpoint, asked by their own code."""

import asyncio
import json
import sys
from typing import Any

import httpx
import pytest

from rig.fake_engine import FakeEngine, Faults
from rig.foreign import PROGRAMS, foreign_env
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool

CONTROL = "control-key-of-the-tests"


async def examined(url: str, key: str) -> dict[str, Any]:
    """OpenEnv's report."""
    packages = await asyncio.to_thread(foreign_env, "conformance")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAMS / "examine_endpoint.py"), str(packages), url, "tiny", key),
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    return dict(json.loads(stdout))


@pytest.mark.parametrize("is_trajectory", [False, True])
async def test_openenv_finds_the_gateway_fit_for_training(is_trajectory: bool) -> None:
    async with FakeEngine() as engine, serve_gateway(LocalPool(), [engine.url], control_keys=[CONTROL]) as url:
        base_url, key = f"{url}/unrecorded/v1", CONTROL
        if is_trajectory:
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {CONTROL}"}) as http:
                opened = (await http.post(f"{url}/init_trajectory", json={})).json()
            base_url, key = opened["base_url"], opened["api_key"]
        report = await examined(base_url, key)
    assert report["ok"], report["findings"]
    assert (report["capture_level"], report["logprobs_mode"], report["param_fixes"]) == ("tokens", "processed", [])


async def test_openenv_tells_raw_log_probabilities_apart() -> None:
    async with FakeEngine() as engine, serve_gateway(LocalPool(), [engine.url], control_keys=[CONTROL]) as url:
        engine.faults = Faults(raw_logprobs=True)
        assert (await examined(f"{url}/unrecorded/v1", CONTROL))["logprobs_mode"] == "raw"
