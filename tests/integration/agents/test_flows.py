"""The ready agents, through a real gateway."""

import asyncio
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.local_pool import LocalPool
from rig.waiting import until
from stepwell.agents.blackbox import Agent, BlackBoxAgentFlow
from stepwell.agents.flows import SingleTurn, SubprocessAgent, ToolLoop, last_number
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import RolloutResult, RolloutStatus, Sample

CALLER = """
import json, os, sys, urllib.request
sample = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sample["question"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("heard", text)
print(sys.argv[1])
"""
HANGING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


async def roll(url: str, agent: Agent, sample: Sample, **settings: Any) -> RolloutResult:
    async with BlackBoxAgentFlow(url, agent, **{"group_size": 1, **settings}) as flow:
        return await flow.rollout(sample, "p")


def question(sample: Sample) -> str:
    return str(sample["question"])


async def test_a_single_turn_is_scored_by_its_text(gateway: str, engine: FakeEngine, pool: LocalPool) -> None:
    engine.replies.append(Reply("four"))
    agent = SingleTurn(question, lambda sample, text: float(text == sample["answer"]), temperature=0.9, max_tokens=9)
    result = await roll(gateway, agent, {"question": "2+2?", "answer": "four"})
    assert (result.status, result.reward) == (RolloutStatus.COMPLETED, 1.0)
    (step,) = pool.taken()
    assert step.sampling["temperature"] == 0.9
    sent = engine.requests[-1].body
    assert (sent["model"], sent["messages"]) == ("tiny", [{"role": "user", "content": "2+2?"}])


async def test_a_single_turn_takes_a_whole_conversation_and_an_async_reward(gateway: str, engine: FakeEngine) -> None:
    async def reward(sample: Sample, text: str) -> float:
        await asyncio.sleep(0)
        return len(text)

    engine.replies.append(Reply("abc"))
    told = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say abc"}]
    result = await roll(gateway, SingleTurn(lambda sample: told, reward), {})
    assert result.reward == 3.0
    assert engine.requests[-1].body["messages"] == told


async def test_tools_are_called_until_the_model_answers_without(
    gateway: str, engine: FakeEngine, pool: LocalPool
) -> None:
    def add(a: int, b: int = 0) -> int:
        """Add two numbers."""
        return a + b

    async def shout(text: str) -> str:
        return text.upper()

    engine.replies.append(Reply(tool_calls=(ToolCall("add", {"a": 1, "b": 2}), ToolCall("shout", {"text": "hey"}))))
    engine.replies.append(Reply(tool_calls=(ToolCall("add", {"c": 1}), ToolCall("divide", {}))))
    engine.replies.append(Reply("three"))
    agent = ToolLoop({"add": add, "shout": shout}, question, lambda sample, text: float(text == "three"))
    result = await roll(gateway, agent, {"question": "1+2?"})
    assert (result.reward, result.why) == (1.0, "")
    assert [step.step_index for step in pool.taken()] == [0, 1, 2]
    last = engine.requests[-1].body
    answers = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    assert answers[:2] == ["3", "HEY"]
    assert "TypeError" in answers[2]
    assert answers[3] == "there is no tool 'divide'; there are: add, shout"
    assert last["tools"][0]["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    }


async def test_a_model_that_only_calls_tools_has_its_turns_and_said_nothing(gateway: str, engine: FakeEngine) -> None:
    engine.replies.extend([Reply(tool_calls=(ToolCall("look", {}),))] * 3)
    agent = ToolLoop({"look": lambda: "dark"}, question, lambda sample, text: float(text == ""), max_turns=3)
    result = await roll(gateway, agent, {"question": "?"})
    assert result.reward == 1.0
    assert len(engine.replies) == 0


async def test_a_command_is_an_agent_and_may_score_itself(gateway: str, engine: FakeEngine, pool: LocalPool) -> None:
    engine.replies.append(Reply("yes"))
    agent = SubprocessAgent([sys.executable, "-c", CALLER, "0.5"], last_number)
    result = await roll(gateway, agent, {"question": "really?"})
    assert (result.status, result.reward, result.why) == (RolloutStatus.COMPLETED, 0.5, "")
    assert [step.reward for step in pool.taken()] == [0.5]
    assert engine.requests[-1].body["messages"] == [{"role": "user", "content": "really?"}]


async def test_a_command_is_scored_by_what_it_wrote_and_may_depend_on_the_sample(
    gateway: str, engine: FakeEngine
) -> None:
    engine.replies.append(Reply("yes"))
    agent = SubprocessAgent(
        lambda sample: [sys.executable, "-c", CALLER, sample["word"]],
        lambda sample, output: float(output.splitlines() == ["heard yes", "done"]),
    )
    assert (await roll(gateway, agent, {"question": "?", "word": "done"})).reward == 1.0


async def test_a_command_whose_output_is_42_is_not_rewarded_for_it_unasked(gateway: str) -> None:
    agent = SubprocessAgent([sys.executable, "-c", CALLER, "42"])
    assert (await roll(gateway, agent, {"question": "?"})).reward is None


async def test_a_command_gets_no_keys_of_this_process(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_CONTROL_KEYS", "the-control-key")
    outputs: list[str] = []
    agent = SubprocessAgent(["env"], lambda sample, output: outputs.append(output), env={"MINE": "yes"})
    await roll(gateway, agent, {})
    names = {line.partition("=")[0] for line in outputs[0].splitlines()}
    assert names >= {"PATH", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "MINE"}
    assert "STEPWELL_GATEWAY_CONTROL_KEYS" not in names


async def test_a_command_that_fails_is_a_failed_agent_with_its_last_words(gateway: str) -> None:
    code = textwrap.dedent("""
        import sys
        sys.exit("no idea")
    """)
    result = await roll(gateway, SubprocessAgent([sys.executable, "-c", code]), {})
    assert result.failure is AgentFailure.ERROR
    assert "exit code 1: no idea" in result.why


async def test_a_command_over_its_time_is_killed_with_what_it_started(gateway: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = SubprocessAgent([sys.executable, "-c", HANGING, str(pids)])
    began = time.monotonic()
    result = await roll(gateway, agent, {}, timeout=2.0)
    assert time.monotonic() - began < 30
    assert (result.failure, result.why) == (AgentFailure.TOO_LONG, "it took longer than 2 s")
    parent, child = pids.read_text().split()
    await until(lambda: not _is_alive(parent) and not _is_alive(child), "both to be gone")


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
