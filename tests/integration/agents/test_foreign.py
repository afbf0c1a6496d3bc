"""Rollouts of tasks in another process, over a real gateway: a made-up framework in place of verifiers or Harbor."""

import asyncio
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.agents.foreign import CHILD, TasksProcess
from stepwell.agents.outcome import AgentFailure
from stepwell.agents.rollout import RolloutCounts
from stepwell.commands.envs_run import EnvsRunSettings, make_rollouts
from stepwell.common.processes import PLAIN_VARIABLES
from stepwell.errors import BadRequest, NotReady

FRAMEWORK = f"""#!{sys.executable}
import asyncio, json, sys, urllib.request
from contextlib import nullcontext

sys.path.insert(0, {str(CHILD)!r})
from task_server import INFRASTRUCTURE, failed, serve, take_stdout

answers = take_stdout()
print("a framework prints")


class Tasks:
    names = ["one", "two", "three"]
    tried = set()

    def serving(self):
        return nullcontext()

    async def run(self, asked):
        said = {{"model": asked["model"], "max_tokens": 4, "messages": [{{"role": "user", "content": "hello"}}]}}
        headers = {{"Authorization": "Bearer " + asked["api_key"], "Content-Type": "application/json"}}
        url = asked["base_url"] + "/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(said).encode(), headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
        print("more")
        return BEHAVE


asyncio.run(serve(Tasks(), answers))
"""
TELLS_ITS_VARIABLES = f"""#!{sys.executable}
import json, os

print(json.dumps({{"tasks": [f"{{name}}={{value}}" for name, value in os.environ.items()]}}), flush=True)
"""
REWARD = '{"reward": float(asked["task"])}'
FAIL_ONCE = """{"reward": 1.0} if self.tried else self.tried.add(1) or failed(INFRASTRUCTURE, "a broken box")"""


def framework(folder: Path, behave: str) -> str:
    """A command that takes the place of a framework's Python."""
    path = folder / "python"
    path.write_text(FRAMEWORK.replace("BEHAVE", behave))
    path.chmod(0o700)
    return str(path)


async def run(pool: LocalPool, engine: FakeEngine, python: str, groups: int | None = None) -> RolloutCounts:
    async with serve_gateway(pool, [engine.url]) as url:
        return await make_rollouts(
            EnvsRunSettings(
                framework="verifiers", tasks="some", gateway=url, python=python, group_size=2, groups=groups, retries=1
            )
        )


async def test_the_rollouts_of_each_task_are_a_group_with_the_rewards_of_the_framework(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    counts = await run(pool, engine, framework(tmp_path, REWARD))
    assert (counts.groups, counts.rollouts["completed"]) == (3, 6)
    assert sorted(counts.rewards) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert pool.rules.stats().channels["train"].ready_groups == 3
    held = pool.rules.state.trajectories.values()
    assert sorted({(one.metadata["framework"], one.metadata["name"]) for one in held}) == [
        ("verifiers", "one"),
        ("verifiers", "three"),
        ("verifiers", "two"),
    ]


async def test_a_failure_of_the_policy_is_trained(pool: LocalPool, engine: FakeEngine, tmp_path: Path) -> None:
    counts = await run(pool, engine, framework(tmp_path, 'failed("too_long", "it slept")'), groups=1)
    assert (counts.groups, counts.failures) == (1, {AgentFailure.TOO_LONG: 2})


async def test_a_failure_of_the_infrastructure_is_tried_again(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    counts = await run(pool, engine, framework(tmp_path, FAIL_ONCE), groups=1)
    assert (counts.groups, counts.rollouts["aborted"], list(counts.rewards)) == (1, 1, [1.0, 1.0])


async def test_a_framework_that_dies_ends_the_run_without_a_group(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path
) -> None:
    counts = await run(pool, engine, framework(tmp_path, "__import__('os')._exit(1)"))
    assert (counts.groups, counts.given_up) == (0, 3)
    assert "has ended" in counts.why


async def test_tasks_that_cannot_be_loaded_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="the tasks of harbor could not be loaded"):
        async with TasksProcess("harbor", "no/such/folder", python=sys.executable):
            pass
    with pytest.raises(BadRequest, match="cannot be started"):
        async with TasksProcess("harbor", "no/such/folder", python="/no/such/python"):
            pass


async def test_a_framework_sees_no_variable_but_the_basic_ones_and_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "STEPWELL_ENVS_KEY", "HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "a-secret")
    python = tmp_path / "python"
    python.write_text(TELLS_ITS_VARIABLES)
    python.chmod(0o700)
    async with TasksProcess("verifiers", "some", python=str(python), variables=("HF_TOKEN",)) as tasks:
        told = dict(sample["name"].split("=", 1) for sample in tasks.samples)
    assert told["HF_TOKEN"] == "a-secret"
    assert told.keys() - {"HF_TOKEN", "LC_CTYPE"} <= set(PLAIN_VARIABLES)  # Python itself sets LC_CTYPE
    assert {"PATH", "HOME"} <= told.keys()


async def test_a_named_variable_that_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(BadRequest, match="HF_TOKEN is not set: set it, or leave it out of --variables"):
        async with TasksProcess("verifiers", "some", variables=("HF_TOKEN",)):
            pass


@pytest.mark.parametrize(
    ("behave", "status", "shown"),
    [(REWARD, 0, "3 groups, 3 rollouts"), ('failed(INFRASTRUCTURE, "a broken box")', 1, "no group was made")],
)
async def test_the_command_says_what_it_made(
    pool: LocalPool, engine: FakeEngine, tmp_path: Path, behave: str, status: int, shown: str
) -> None:
    flags = ["--group-size", "1", "--retries", "0", "--python", framework(tmp_path, behave)]
    async with serve_gateway(pool, [engine.url]) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stepwell", "envs", "run", "verifiers", "some", "--gateway", url, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        stdout, _ = await process.communicate()
    assert (process.returncode, shown in stdout.decode()) == (status, True), stdout.decode()


@pytest.mark.parametrize("framework", ["verifiers", "harbor"])
def test_a_framework_that_is_not_installed_is_a_sentence(framework: str, tmp_path: Path) -> None:
    """In a new environment, as `stepwell envs run` is first tried."""
    venv.EnvBuilder(symlinks=True).create(tmp_path / "bare")
    python = str(tmp_path / "bare" / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "envs", "run", framework, str(tmp_path), "--python", python],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    missing, summary = done.stderr.splitlines()
    assert missing.startswith(f"{framework} is not installed in {python}: install it there ({python} -m pip install ")
    assert missing.endswith("or name the Python that has it with --python")
    assert summary.endswith("could not be loaded; the lines above say why")
