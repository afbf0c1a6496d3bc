"""What the ready harnesses are told and what is left of them, with a program of our own in their place."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rig.fake_engine import FakeEngine
from rig.waiting import until
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.cli_agents import HARNESSES, ClaudeCode
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import RolloutStatus, Sample
from tests.integration.agents.test_gateway_process import is_alive

REPORTING = """
import json, os, pathlib, sys
home = pathlib.Path.home()
told = {
    "arguments": sys.argv[1:],
    "stdin": sys.stdin.read(),
    "env": dict(os.environ),
    "files": {str(path): path.read_text() for path in home.rglob("*") if path.is_file()},
    "work": {path.name: path.read_text() for path in pathlib.Path.cwd().iterdir()},
    "folders": [str(home), os.getcwd(), os.environ["TMPDIR"]],
}
report = pathlib.Path(os.environ["REPORT"])
report.with_suffix(".new").write_text(json.dumps(told))
report.with_suffix(".new").rename(report)
"""
ENDS = {"error": "sys.exit(3)", "too_long": "import time; time.sleep(600)"}
DETACHING = """
import subprocess
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(left.pid)
"""


class StandIn:
    """A program that writes down what it is told."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "harness"
        self.report = folder / "report.json"

    def write(self, then: str) -> dict[str, Any]:
        """The arguments for a harness that runs the program, which does `then` in the end."""
        self.program.write_text(f"#!{sys.executable}\n{REPORTING}\n{then}\n")
        self.program.chmod(0o700)
        return {"program": str(self.program), "env": {"REPORT": str(self.report)}}

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.report.read_text())
        return told

    def left(self) -> list[str]:
        return [folder for folder in self.told()["folders"] if Path(folder).exists()]


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def put_note(sample: Sample, folder: Path) -> None:
    (folder / "note.txt").write_text(sample["note"])


def flow_of(url: str, harness: Callable[..., Any], **settings: Any) -> BlackBoxAgentFlow:
    return BlackBoxAgentFlow(url, harness, group_size=1, **settings)


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_harness_is_told_its_trajectory_and_nothing_of_this_process(
    name: str, gateway: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_CONTROL_KEYS", "the-control-key")
    rewarded: list[tuple[str, list[str]]] = []

    def reward(sample: Sample, answer: str, folder: Path) -> float:
        rewarded.append((answer, sorted(path.name for path in folder.iterdir())))
        return 0.5

    made = HARNESSES[name](lambda sample: sample["task"], put_note, reward, **stand_in.write("print('done')"))
    async with flow_of(gateway, made) as flow:
        await flow.rollout({"task": "Mend the note.", "note": "torn"}, "p")
    told = stand_in.told()
    assert "Mend the note." in [told["stdin"], *told["arguments"]]
    assert told["work"] == {"note.txt": "torn"}
    settings = json.dumps([told["env"], told["files"]])
    assert gateway in settings
    assert "tiny" in settings
    assert "the-control-key" not in settings
    assert all(path.startswith(told["env"]["HOME"]) for path in told["files"])
    assert rewarded == [("done", ["note.txt"])]
    assert stand_in.left() == []


@pytest.mark.parametrize("failure", ENDS)
async def test_nothing_is_left_of_a_harness_that_fails(failure: str, gateway: str, stand_in: StandIn) -> None:
    made = ClaudeCode(lambda sample: "Go.", **stand_in.write(ENDS[failure]))
    async with flow_of(gateway, made, timeout=5.0) as flow:
        result = await flow.rollout({}, "p")
    assert result.failure is AgentFailure(failure)
    assert stand_in.left() == []


async def test_a_process_that_a_harness_detached_ends_with_the_rollout(gateway: str, stand_in: StandIn) -> None:
    left: list[int] = []

    def reward(sample: Sample, answer: str, folder: Path) -> float:
        left.append(int(answer))
        return 1.0

    made = ClaudeCode(lambda sample: "Go.", reward=reward, **stand_in.write(DETACHING))
    async with flow_of(gateway, made) as flow:
        await flow.rollout({}, "p")
    assert not is_alive(left[0])


async def test_nothing_is_left_of_a_harness_that_is_cancelled(gateway: str, stand_in: StandIn) -> None:
    made = ClaudeCode(lambda sample: "Go.", **stand_in.write(ENDS["too_long"]))
    async with flow_of(gateway, made) as flow:
        running = asyncio.create_task(flow.rollout({}, "p"))
        await until(stand_in.report.exists, "the harness to start")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert stand_in.left() == []


async def test_a_harness_that_is_not_installed_fails_with_its_name(gateway: str, engine: FakeEngine) -> None:
    async with flow_of(gateway, ClaudeCode(lambda sample: "Go.", program="no/such/claude")) as flow:
        result = await flow.rollout({}, "p")
    assert result.status is not RolloutStatus.FAILED
    assert "no/such/claude cannot be started" in result.why
