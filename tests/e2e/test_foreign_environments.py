"""`stepwell envs run` with verifiers 0.4 and Harbor 0.25 as published, over a real gateway and the fake engine."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rig.fake_engine import FakeEngine, Reply
from rig.foreign import HARBOR_TASK, PROGRAMS, foreign_env
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.agents.foreign import CHILD
from stepwell.agents.rollout import RolloutCounts
from stepwell.commands.envs_run import EnvsRunSettings, make_rollouts

CONTROL = "control-key-of-the-tests"
VARIABLES = ("PYTHONPATH", "LITELLM_LOCAL_MODEL_COST_MAP")


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture(autouse=True)
def path_to_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else Harbor looks for prices on the internet


async def run(pool: LocalPool, engine: FakeEngine, folder: Path, config: dict[str, Any], **more: Any) -> RolloutCounts:
    path = folder / "config.json"
    more |= {"group_size": 2, "retries": 0, "concurrency": 1, "variables": VARIABLES}
    path.write_text(json.dumps(config))
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        return await make_rollouts(EnvsRunSettings(gateway=url, key=CONTROL, config=str(path), **more))


def names_in(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


def steps_of(pool: LocalPool) -> list[int]:
    return sorted(len(one.steps) for one in pool.rules.state.trajectories.values())


async def test_episodes_of_verifiers_are_rollouts_with_its_rewards(engine: FakeEngine, tmp_path: Path) -> None:
    pool = LocalPool()
    engine.replies.extend(Reply(text) for text in ("hm", "ONE", "hm", "one", "hm", "TWO", "hm", "TWO"))
    config = {"env": {"agent": {"runtime": {"type": "subprocess"}}}, "limit": 2}
    python = str(foreign_env("verifiers"))
    counts = await run(pool, engine, tmp_path, config, framework="verifiers", tasks="shouting-v1", python=python)
    assert (counts.groups, counts.why) == (2, "")
    assert list(counts.rewards) == [1.0, 0.0, 1.0, 1.0]
    assert steps_of(pool) == [2, 2, 2, 2]


async def test_the_rollouts_of_verifiers_are_told_apart_at_one_base_url(engine: FakeEngine) -> None:
    pool = LocalPool()
    async with serve_gateway(pool, [engine.url], control_keys=[CONTROL]) as url:
        process = await asyncio.create_subprocess_exec(
            *(str(foreign_env("verifiers")), str(PROGRAMS / "one_base_url.py"), f"{url}/v1"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "KEY": CONTROL},
        )
        stdout, _ = await process.communicate()
    assert process.returncode == 0
    assert sorted(pool.rules.state.trajectories) == sorted(json.loads(stdout))
    assert steps_of(pool) == [2, 2]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_harbor_task_runs_in_a_local_sandbox(engine: FakeEngine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hello")
    pool = LocalPool()
    engine.replies.extend([Reply("echo hello > /app/out.txt"), Reply(f"cp {secret} /app/out.txt; touch {secret}.seen")])
    config = {"agent": {"import_path": "shell_agent:ShellAgent"}, "trials_dir": str(tmp_path / "trials")}
    python = str(foreign_env("harbor"))
    counts = await run(pool, engine, tmp_path, config, framework="harbor", tasks=str(HARBOR_TASK), python=python)
    assert (counts.groups, counts.why) == (1, "")
    assert list(counts.rewards) == [1.0, 0.0]
    assert steps_of(pool) == [1, 1]
    assert names_in(tmp_path, "secret*") == ["secret"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_nothing_gets_out_of_the_local_sandbox(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        command = [*map(str, (foreign_env("harbor"), PROGRAMS / "try_sandbox.py", CHILD, tmp_path, port))]
        told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    assert told.pop("reads") != 0
    assert told.pop("writes") != 0
    assert int(told.pop("processes")) < 10
    assert told.pop("connects") == {"silent": False, "silent, with network": True, "none, with network": False}
    assert "asks for a network" in told.pop("refuses")
    assert [line.split(":")[0].strip() for line in told.pop("networks").splitlines()] == ["lo"]
    assert told == {
        "keeps": "kept\n",
        "variables": "a-/root\n",
        "downloaded": ["log"],
        "leads_outside": [True, True],
        "is_stopped": True,
        "is_left": False,
    }
