"""A fault of the machine is not trained: its rollout is aborted, tried again, and counted by its exception."""

import errno
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.cli_agents import ClaudeCode
from stepwell.agents.dataset import Dataset
from stepwell.agents.flows import SubprocessAgent, ToolLoop
from stepwell.agents.foreign import TasksBroken, reward_of
from stepwell.agents.outcome import AgentFailed
from stepwell.agents.rollout import Rollout, RolloutResult, RolloutStatus
from stepwell.agents.rollouter import AsyncRollouter

FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


def raising(failure: Exception) -> Callable[[Rollout], Awaitable[float]]:
    async def agent(rollout: Rollout) -> float:
        await rollout.chat([{"role": "user", "content": "hello"}], max_tokens=2)
        raise failure

    return agent


def writes_to_a_full_disk() -> str:
    raise FULL_DISK


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def result_of(agent: Any, engine: FakeEngine) -> tuple[RolloutResult, int, str]:
    """The result, how many rollouts of its group the pool counts, and the gateway's metrics."""
    pool = LocalPool()
    async with engine, serve_gateway(pool, [engine.url], prompt_length=8192, response_length=256) as url:
        async with BlackBoxAgentFlow(url, agent, group_size=1) as flow:
            result = await flow.rollout({}, "p")
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
            metrics = await answer.text()
        return result, pool.rules.stats().channels["train"].ready_groups, metrics


@pytest.mark.parametrize(
    "failure",
    [
        FULL_DISK,
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        MemoryError(),
        ModuleNotFoundError("No module named 'x'"),
        subprocess.CalledProcessError(125, ["docker", "run", "image"]),
    ],
)
async def test_a_fault_of_the_machine_is_aborted_and_counted_by_its_exception(
    failure: Exception, engine: FakeEngine
) -> None:
    result, ready, metrics = await result_of(raising(failure), engine)
    name = type(failure).__name__
    assert (result.status, result.failure, result.reward) == (RolloutStatus.ABORTED, None, None)
    assert (result.exception, ready) == (name, 0)
    assert f'stepwell_rollouts_ended_total{{exception="{name}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("command", "exception"),
    [
        (["no/such/command"], "CommandFailed"),
        (["sh", "-c", "no-such-command"], "CommandFailed"),
        ([sys.executable, "-c", "import no_such_package"], "ModuleNotFoundError"),
        ([sys.executable, "-c", "raise OSError(28, 'No space left on device')"], "OSError"),
    ],
)
async def test_a_command_that_the_machine_fails_is_aborted(
    command: list[str], exception: str, engine: FakeEngine
) -> None:
    result, ready, _ = await result_of(SubprocessAgent(command), engine)
    assert (result.status, result.exception, ready) == (RolloutStatus.ABORTED, exception, 0)


async def test_a_harness_that_is_not_installed_is_aborted(engine: FakeEngine, tmp_path: Path) -> None:
    result, ready, _ = await result_of(ClaudeCode(lambda sample: "Go.", program=str(tmp_path / "claude")), engine)
    assert (result.status, ready) == (RolloutStatus.ABORTED, 0)


async def test_a_tool_without_disk_ends_the_rollout_and_is_not_told_to_the_model(engine: FakeEngine) -> None:
    engine.replies.append(Reply(tool_calls=(ToolCall("write", {}),)))
    agent = ToolLoop({"write": writes_to_a_full_disk}, lambda sample: "Write.", lambda sample, text: 1.0)
    result, ready, _ = await result_of(agent, engine)
    assert (result.status, result.exception, ready) == (RolloutStatus.ABORTED, "OSError", 0)
    assert engine.request_count == 1


@pytest.mark.parametrize("why", ["TaskError: ModuleNotFoundError: No module named 'x'", "HarnessError: [Errno 24]"])
def test_a_framework_that_wraps_a_fault_of_the_machine_is_not_the_policy(why: str) -> None:
    with pytest.raises(TasksBroken):
        reward_of({"failure": "error", "why": why})
    with pytest.raises(AgentFailed):
        reward_of({"failure": "error", "why": "TaskError: the answer is not a number"})


async def test_an_unknown_exception_that_ends_a_tenth_of_the_rollouts_is_said_once(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class SandboxLost(Exception):
        """No table knows it."""

    caplog.set_level(logging.WARNING, "stepwell.agents")
    pool, lines = LocalPool(), list[str]()

    async def agent(rollout: Rollout) -> float:
        if rollout.sample["n"] % 5 == 0:
            raise SandboxLost("the container is gone")
        await rollout.chat([{"role": "user", "content": "hello"}], max_tokens=2)
        return 1.0

    async with engine, serve_gateway(pool, [engine.url]) as url:
        flow = BlackBoxAgentFlow(url, agent, group_size=1)
        rollouter = AsyncRollouter(
            flow,
            Dataset([{"n": n} for n in range(100)], epochs=1),
            gateway=url,
            on_result=lambda _: lines.append(rollouter.counts.line(0, 1.0)),
        )
        counts = await rollouter.run()
    assert counts.exceptions == Counter(SandboxLost=20)
    assert counts.alarm == "SandboxLost"
    said = [record.getMessage() for record in caplog.records if "more than a tenth" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("SandboxLost ended more than a tenth of the last 100 rollouts")
    assert "retry_on=" in said[0]
    assert "20 of the last 100 ended by SandboxLost" in lines[-1]
    assert not any("ended by SandboxLost" in line for line in lines[:10])
