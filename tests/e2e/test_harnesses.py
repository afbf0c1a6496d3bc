"""The harnesses that people run, unmodified and from their registries: each context of theirs is one training row.

Each reads a file, edits it, runs a command and answers, with its own tools. A fake engine plays the model; gateway,
bridge, pool and flow are the real ones.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from rig.agents import TaskEngine, installed
from rig.agents.engine import NOTE, PROMPT, SUMMARY
from rig.agents.gateway import CONTROL_KEY, AgentsGateway, agents_gateway, reply_text
from rig.agents.task import CALLS, DELEGATING, ERRAND, LOOK
from rig.fake_engine import ToolCall
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.cli_agents import HARNESSES, Codex, CommandLineHarness
from stepwell.agents.rollout import RolloutResult, RolloutStatus
from stepwell.steps.columns import pack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import Step

SIDE_CALLS: Mapping[str, list[str]] = {"opencode": ["side_call: title"]}
TIMEOUT = 600.0
"""OpenClaw compiles its modules when it is started for the first time, which takes minutes on a slow machine."""


@pytest.fixture(scope="module")
def gateway(
    ray_cluster: RayCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentsGateway]:
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with (
        in_thread(TaskEngine()) as engine,
        agents_gateway(ray_cluster, engine, tiny_model, log, bridge="on") as gateway,
    ):
        yield gateway


async def roll_out(url: str, harness: CommandLineHarness) -> RolloutResult:
    async with BlackBoxAgentFlow(url, harness, key=CONTROL_KEY, group_size=1, timeout=TIMEOUT) as flow:
        return await flow.rollout({}, uuid4().hex)


def rows_of(task: list[Step]) -> int:
    """Rows in which every sampled token is trained once."""
    rows = merge_rows(pack(task), np.zeros(len(task), np.int64), np.zeros(1, np.int64))
    assert int(rows.loss_mask.sum()) == sum(len(step.response_ids) for step in task)
    return len(rows.trajectory_of_R)


@pytest.mark.parametrize("name", CALLS)
def test_four_turns_of_a_harness_are_one_row_and_its_home_is_deleted(
    name: str, gateway: AgentsGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_CONTROL_KEYS", CONTROL_KEY)
    gateway.engine.requests.clear()
    left: dict[str, Any] = {}

    def prepare(sample: Mapping[str, Any], folder: Path) -> None:
        (note := folder / "note.txt").write_text(NOTE)
        gateway.engine.calls = tuple(CALLS[name](str(note)))

    def reward(sample: Mapping[str, Any], answer: str, folder: Path) -> float:
        left.update(answer=answer, note=(folder / "note.txt").read_text(), env=(folder / "env.txt").read_text())
        return 0.75

    kind = HARNESSES[name]
    harness = kind(lambda sample: PROMPT, prepare, reward, **installed(kind))
    result = asyncio.run(roll_out(gateway.url, harness))

    assert (result.status, result.why, result.reward) == (RolloutStatus.COMPLETED, "", 0.75)
    assert left["answer"].strip() == "It keeps egret."
    assert left["note"] == NOTE.replace("heron", "egret")
    assert CONTROL_KEY not in left["env"]
    home = dict(line.partition("=")[::2] for line in left["env"].splitlines())["HOME"]
    assert home != str(Path.home())
    assert not Path(home).exists()

    ((steps,),) = gateway.pool.fetch_batch(1, untrainable=True, timeout=60).groups()
    assert sorted(step.prompt_ids.tolist() for step in steps) == sorted(gateway.prompts())
    assert [step.untrainable for step in steps if step.untrainable] == SIDE_CALLS.get(name, [])
    task = [step for step in steps if not step.untrainable]
    assert [reply_text(step) for step in task] == [*(c.written() for c in gateway.engine.calls), "It keeps egret."]
    assert [step.prompt_made for step in task[1:]] == ["bridged"] * 3
    assert [step.reward for step in task] == [None, None, None, 0.75]
    assert rows_of(task) == 1


@pytest.mark.parametrize("name", DELEGATING)
def test_a_sub_agent_is_a_row_of_its_own_in_the_same_trajectory(
    name: str, gateway: AgentsGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_CONTROL_KEYS", CONTROL_KEY)
    gateway.engine.requests.clear()

    def prepare(sample: Mapping[str, Any], folder: Path) -> None:
        (note := folder / "note.txt").write_text(NOTE)
        calls, errand = DELEGATING[name](str(note))
        gateway.engine.calls, gateway.engine.delegated = tuple(calls), {ERRAND: tuple(errand)}

    kind = HARNESSES[name]
    harness = kind(lambda sample: PROMPT, prepare, lambda *of: 0.5, **installed(kind))
    result = asyncio.run(roll_out(gateway.url, harness))
    assert (result.status, result.why, result.reward) == (RolloutStatus.COMPLETED, "", 0.5)

    ((steps,),) = gateway.pool.fetch_batch(1, untrainable=True, timeout=60).groups()
    task = [step for step in steps if not step.untrainable]
    (asks, looks), (reads,) = gateway.engine.calls, gateway.engine.delegated[ERRAND]
    answer = "It keeps heron."
    replies = [reply_text(step) for step in task]
    assert replies == [asks.written(), reads.written(), answer, looks.written(), answer]
    assert [step.prompt_made == "bridged" for step in task] == [False, False, True, True, True]
    assert rows_of(task) == 2


def test_a_compacted_context_is_a_row_of_its_own_in_the_same_trajectory(
    gateway: AgentsGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_CONTROL_KEYS", CONTROL_KEY)
    gateway.engine.requests.clear()
    reads, looks = ToolCall("exec_command", {"cmd": "cat long.txt"}), ToolCall("exec_command", {"cmd": LOOK})
    monkeypatch.setattr(gateway.engine, "calls", (reads, reads))
    monkeypatch.setattr(gateway.engine, "delegated", {SUMMARY: (looks,)})
    monkeypatch.setattr(gateway.engine, "compaction", "CONTEXT CHECKPOINT COMPACTION")

    def prepare(sample: Mapping[str, Any], folder: Path) -> None:
        (folder / "note.txt").write_text(NOTE)
        (folder / "long.txt").write_text("A long story.\n" * 700)

    limit = ["-c", "model_auto_compact_token_limit=45000"]
    harness = Codex(lambda sample: PROMPT, prepare, lambda *of: 0.5, arguments=limit, **installed(Codex))
    result = asyncio.run(roll_out(gateway.url, harness))
    assert (result.status, result.why, result.reward) == (RolloutStatus.COMPLETED, "", 0.5)

    ((steps,),) = gateway.pool.fetch_batch(1, untrainable=True, timeout=60).groups()
    replies = [reply_text(step) for step in steps]
    assert replies == [reads.written(), reads.written(), SUMMARY, looks.written(), "It keeps heron."]
    assert [step.untrainable for step in steps] == [None, None, "side_call: summary", None, None]
    task = [step for step in steps if not step.untrainable]
    assert [step.prompt_made == "bridged" for step in task] == [False, True, False, True]
    assert rows_of(task) == 2
