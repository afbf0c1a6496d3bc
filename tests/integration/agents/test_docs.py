"""The Python of docs/agents.md, run as it stands there against a fake engine. Addresses and data are the tests' own."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stepwell.pool.actors import start_pool

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import AgentFlow, RolloutResult, RolloutStatus
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
SAMPLE = {"question": "2 + 2?", "answer": "4"}
CLAUDE = """
import json, os, pathlib, sys, urllib.request
asked = [{"role": "user", "content": pathlib.Path("README.md").read_text() + sys.stdin.read()}]
body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "messages": asked}
headers = {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
pathlib.Path("answer.txt").write_text("4")
"""
"""What stands in for Claude Code."""


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def example(mark: str) -> str:
    """The one block with those words in it."""
    (block,) = [block for block in examples() if mark in block]
    return block


class Page:
    """Blocks run one after the other, in one scope, with addresses of the test's own."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses = addresses
        self.scope: dict[str, Any] = {}

    def run(self, mark: str) -> dict[str, Any]:
        block = example(mark)
        for theirs, ours in self._addresses.items():
            block = block.replace(theirs, ours)
        exec(block, self.scope)
        return self.scope


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the page's files."""
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps(SAMPLE)}\n" * 2)
    (tmp_path / "my_agent.py").write_text(example("json.load(sys.stdin)"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(tiny_model))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


@asynccontextmanager
async def serving(pool: LocalPool) -> AsyncIterator[str]:
    async with FakeEngine() as engine, serve_gateway(pool, [engine.url]) as url:
        yield url


@pytest.fixture
def page(memory: LocalPool, folder: Path) -> Iterator[Page]:
    with in_thread(serving(memory)) as url:
        yield Page({"http://127.0.0.1:8100": url})


@pytest.fixture
def memory() -> LocalPool:
    return LocalPool()


def rolled(flow: AgentFlow) -> RolloutResult:
    async def roll() -> RolloutResult:
        async with flow:
            return await flow.rollout(SAMPLE, "p")

    return asyncio.run(roll())


def complete_groups(pool: LocalPool, channel: str = "train") -> int:
    return pool.rules.stats().channels[channel].ready_groups


def test_the_first_agent_makes_groups_of_the_whole_dataset(page: Page, memory: LocalPool) -> None:
    tally = page.run("AsyncOpenAI")["tally"]
    assert (tally.groups, tally.given_up, dict(tally.rollouts)) == (4, 0, {"completed": 32})
    assert complete_groups(memory) == 4
    assert {step.metadata["question"] for step in memory.taken()} == {"2 + 2?"}


@pytest.mark.parametrize("name", ["asked_once", "with_tools", "a_command"])
def test_the_ready_agents_make_rollouts_and_score_them(page: Page, memory: LocalPool, name: str) -> None:
    page.run("AsyncOpenAI")
    result = rolled(page.run("ToolLoop")[name])
    assert result.status is RolloutStatus.COMPLETED, result.why
    assert result.reward is not None


def test_a_harness_is_scored_by_what_it_leaves_in_its_folder(
    page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (claude := folder / "claude").write_text(f"#!{sys.executable}\n{CLAUDE}")
    claude.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    page.run("AsyncOpenAI")
    result = rolled(page.run("ClaudeCode(")["coding"])
    assert (result.status, result.reward, result.why) == (RolloutStatus.COMPLETED, 1.0, "")


def test_the_careful_agent_chooses_the_rewards_of_its_failures(page: Page, memory: LocalPool) -> None:
    page.run("AsyncOpenAI")
    flow = page.run("SandboxLost")["strict"]
    assert flow.failure_rewards == {AgentFailure.TOO_LONG: -1.0}
    assert rolled(flow).status is RolloutStatus.COMPLETED


def test_the_white_box_agent_submits_its_steps(page: Page, memory: LocalPool) -> None:
    page.run("AsyncOpenAI")
    result = rolled(page.run("class Completing")["white_box"])
    assert result.status is RolloutStatus.COMPLETED, result.why
    assert memory.rules.stats().channels["train"].accepted.steps == 33


def test_the_position_in_the_dataset_is_kept(page: Page, folder: Path) -> None:
    page.run("AsyncOpenAI")
    for epoch in (1, 2):
        page.run("position.json")
        assert json.loads((folder / "position.json").read_text())["epoch"] == epoch


def test_validation_has_a_channel_of_its_own(page: Page, memory: LocalPool, capsys: pytest.CaptureFixture[str]) -> None:
    page.run("AsyncOpenAI")
    page.run("Validation(")
    assert "ValidationReport(policy_version=None" in capsys.readouterr().out
    assert (complete_groups(memory), complete_groups(memory, "validation")) == (6, 2)


def test_the_rollouter_starts_a_gateway_of_its_own(
    folder: Path, ray_cluster: RayCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_RAY_ADDRESS", ray_cluster.address)
    monkeypatch.setenv("STEPWELL_GATEWAY_RAY_NAMESPACE", namespace)
    start_pool(PoolPlan(), namespace)
    with in_thread(FakeEngine()) as engine, in_thread(serving(LocalPool())) as url:
        page = Page({"http://127.0.0.1:8100": url, "http://127.0.0.1:8001": engine.url})
        page.run("AsyncOpenAI")
        page.run("GatewayProcess(")
    stats = DataPool(PoolClient("data_pool", namespace)).stats()
    assert stats.channels["train"].ready_groups == 2


def test_every_block_of_the_page_is_run_here() -> None:
    marks = re.findall(r'(?:run|example)\("(.*?)"\)', Path(__file__).read_text())
    assert [block for block in examples() if not any(mark in block for mark in marks)] == []


def test_every_status_is_listed() -> None:
    table = PAGE.read_text().partition("| `status` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(RolloutStatus)


def test_every_failure_is_listed() -> None:
    table = PAGE.read_text().partition("| `failure` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(AgentFailure)
