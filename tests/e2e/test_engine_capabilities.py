"""Real vLLM, started with the command of the docs, is judged by what it does: as it is, as another version, and behind
proxies that take a capability away."""

import asyncio
from pathlib import Path

import pytest
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from rig.engine_proxy import CONTROL, RENDERERS, EngineProxy
from rig.threads import in_thread
from rig.vllm_server import VllmServer
from stepwell.commands.processes import missing_lines
from stepwell.doctor.examination import examine
from stepwell.doctor.findings import Grade, plain
from stepwell.engines.vllm_control import base_flags
from tests.e2e.test_bridge import TURNS, roll_out, rows_of
from tests.integration.doctor.test_faults import found
from tests.integration.engines.test_missing import LACKING

PATIENCE = 120.0
"""On a starved machine a token takes longer than `up` waits for it."""


def test_the_command_of_the_docs_starts_an_engine_that_lacks_nothing(vllm: VllmServer) -> None:
    """tests/e2e/test_doctor.py sees that the doctor calls it exact, and test_weight_sync.py brings it weights."""
    started = Path(f"/proc/{vllm.pid}/cmdline").read_text().split("\0")
    at = started.index("--logprobs-mode")
    assert tuple(started[at : at + len(base_flags("hermes"))]) == base_flags("hermes")
    assert "VLLM_SERVER_DEV_MODE=1" in Path(f"/proc/{vllm.pid}/environ").read_text().split("\0")
    assert missing_lines([vllm.url], None, PATIENCE) == {}


async def test_a_vllm_that_calls_itself_another_version_is_bridged(vllm: VllmServer) -> None:
    async with EngineProxy(vllm.url, version="0.99.0") as proxy:
        trajectories = await roll_out(proxy.url, ThinkingPolicy.TEMPLATE, stream=True)
        assert await asyncio.to_thread(missing_lines, [proxy.url], None, PATIENCE) == {}
    made = {step.prompt_made for steps in trajectories for step in steps[1:]}
    assert (made, {len(steps) for steps in trajectories}) == ({"bridged"}, {TURNS})
    assert len(rows_of(trajectories).trajectory_of_R) == len(trajectories), "a conversation is one row"


@pytest.mark.parametrize("name", LACKING)
def test_up_names_what_a_real_vllm_lacks(vllm: VllmServer, name: str) -> None:
    taken, cost, remedy = LACKING[name]
    with in_thread(EngineProxy(vllm.url, **taken)) as proxy:
        (line,) = missing_lines([proxy.url], None, PATIENCE)
    assert (line.startswith(cost), remedy in line) == (True, True), line


async def test_the_doctor_names_all_that_is_missing_and_finds_the_rest_exact(vllm: VllmServer) -> None:
    async with EngineProxy(vllm.url, version="0.99.0", closed=(*RENDERERS, *CONTROL)) as proxy:
        report = await examine(proxy.url)
        said = await asyncio.to_thread(missing_lines, [proxy.url], None, PATIENCE)
    assert [line.partition(":")[0] for line in report.missing] == ["turns do not join", "no weight sync"]
    assert tuple(said) == report.missing, "as up says it"
    assert found(report, "engine").grade is Grade.OK
    assert report.is_exact, plain(report)
