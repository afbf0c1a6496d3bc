"""Real agents through a real gateway: nothing of theirs is changed but the base_url and the key.

Each does a task that takes a tool, with a fake engine for a model, so that what it says and does is known beforehand.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rig.agents import AGENTS, Agent, TaskEngine
from rig.agents.engine import NOTE, PROMPT
from rig.agents.gateway import CONTROL_KEY, AgentsGateway, agents_gateway, reply_text
from rig.fake_engine import ToolCall
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from stepwell.agents.cli_agents import ModelAccess

ANSWER = "It keeps heron."


@pytest.fixture(scope="module")
def gateway(
    ray_cluster: RayCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentsGateway]:
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with in_thread(TaskEngine()) as engine, agents_gateway(ray_cluster, engine, tiny_model, log) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def control(gateway: AgentsGateway) -> Iterator[httpx.Client]:
    """The gateway, as whoever runs the agents reaches it."""
    headers = {"Authorization": f"Bearer {CONTROL_KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=120) as client:
        yield client


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_every_call_of_an_agent_is_a_step_and_its_side_calls_are_told_apart(
    agent: Agent, gateway: AgentsGateway, control: httpx.Client, tmp_path: Path
) -> None:
    (work := tmp_path / "work").mkdir()
    (home := tmp_path / "home").mkdir()
    (note := work / "note.txt").write_text(NOTE)
    gateway.engine.calls = (ToolCall(agent.read_tool, {agent.path_argument: str(note)}),)
    gateway.engine.requests.clear()
    counted = side_calls_counted(control)
    opened = control.post("/init_trajectory").json()
    access = ModelAccess(base_url=opened["base_url"], api_key=opened["api_key"], model=gateway.engine.model)

    said = agent.run(access, PROMPT, work, home)

    assert said.strip() == ANSWER
    control.post(f"{opened['base_url']}/v1/complete_trajectory", json={"reward": 1.0}).raise_for_status()
    ((steps,),) = gateway.pool.fetch_batch(1, untrainable=True, timeout=60).groups()
    assert sorted(step.prompt_ids.tolist() for step in steps) == sorted(gateway.prompts())
    task = [step for step in steps if step.untrainable is None]
    assert agent.read_tool in reply_text(task[0])
    assert reply_text(task[1]) == ANSWER
    assert [step.reward for step in task if step.reward is not None] == [1.0]
    beside = [step.untrainable for step in steps if step.untrainable is not None]
    assert beside == [f"side_call: {kind}" for kind in agent.side_calls]
    assert side_calls_counted(control) == counted + len(beside)


def side_calls_counted(control: httpx.Client) -> int:
    metrics = control.get("/metrics").text
    found = re.search(r'^stepwell_untrainable_total\{reason="side_call"\} (\d+)', metrics, re.MULTILINE)
    return int(found[1]) if found else 0
