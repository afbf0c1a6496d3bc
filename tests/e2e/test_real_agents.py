"""Real agents through a real gateway: nothing of theirs is changed but the base_url and the key.

Each does a task that takes a tool, with a fake engine for a model, so that what it says and does is known beforehand.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.actor import start_pool
from stepwell.steps.step import Step
from tests.rig.agents import AGENTS, Access, Agent, ReadingEngine
from tests.rig.agents.engine import ANSWER, CONTEXT, NOTE, PROMPT
from tests.rig.chatml import render_chat
from tests.rig.fake_engine import ToolCall
from tests.rig.gateways import gateway_process
from tests.rig.ray_cluster import RayCluster
from tests.rig.threads import in_thread
from tests.rig.vocabulary import encode, pieces

CONTROL_KEY = "the-key-of-whoever-runs-the-agents"


@pytest.fixture(scope="module")
def namespace(ray_cluster: RayCluster) -> Iterator[str]:
    with ray_cluster.namespace() as name:
        start_pool(PoolPlan(), name)
        yield name


@pytest.fixture(scope="module")
def pool(namespace: str) -> DataPool:
    return DataPool(PoolClient("data_pool", namespace))


@pytest.fixture(scope="module")
def engine() -> Iterator[ReadingEngine]:
    with in_thread(ReadingEngine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def control(
    ray_cluster: RayCluster,
    namespace: str,
    engine: ReadingEngine,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """The gateway, as whoever runs the agents reaches it."""
    with (
        gateway_process(
            tmp_path_factory.mktemp("gateway") / "gateway.log",
            env={"STEPWELL_GATEWAY_CONTROL_KEYS": CONTROL_KEY},
            data_pool_name="data_pool",
            vllm_addresses=engine.url,
            tokenizer_path=tiny_model,
            ray_address=ray_cluster.address,
            ray_namespace=namespace,
            prompt_length=CONTEXT,
            response_length=1024,
        ) as gateway,
        httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {CONTROL_KEY}"}) as client,
    ):
        yield client


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_every_call_of_an_agent_is_a_step_and_its_side_calls_are_told_apart(
    agent: Agent, engine: ReadingEngine, pool: DataPool, control: httpx.Client, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (note := tmp_path / "work" / "note.txt").write_text(NOTE)
    engine.tool = ToolCall(agent.read_tool, {agent.path_argument: str(note)})
    engine.requests.clear()
    counted = side_calls_counted(control)
    opened = control.post("/init_trajectory").json()

    said = agent.run(Access(opened["base_url"], opened["api_key"]), PROMPT, tmp_path / "work", tmp_path / "home")

    assert said.strip() == ANSWER
    control.post(f"{opened['base_url']}/v1/complete_trajectory", json={"reward": 1.0}).raise_for_status()
    ((steps,),) = pool.fetch_batch(1, untrainable=True, timeout=10).groups()
    assert sorted(step.prompt_ids.tolist() for step in steps) == sorted(prompts(engine))
    task = [step for step in steps if step.untrainable is None]
    assert agent.read_tool in text(task[0])
    assert text(task[1]) == ANSWER
    assert [step.reward for step in task if step.reward is not None] == [1.0]
    beside = [step.untrainable for step in steps if step.untrainable is not None]
    assert beside == [f"side_call: {kind}" for kind in agent.side_calls]
    assert side_calls_counted(control) == counted + len(beside)


def prompts(engine: ReadingEngine) -> list[list[int]]:
    """What the engine was asked to go on from, call by call."""
    calls = [seen.body for seen in engine.requests if seen.path == "/v1/chat/completions"]
    return [encode(render_chat(call["messages"], call.get("tools") or [])) for call in calls]


def text(step: Step) -> str:
    return "".join(pieces(step.response_ids.tolist()))


def side_calls_counted(control: httpx.Client) -> int:
    metrics = control.get("/metrics").text
    found = re.search(r'^stepwell_untrainable_total\{reason="side_call"\} (\d+)', metrics, re.MULTILINE)
    return int(found[1]) if found else 0
