"""`stepwell train`, the command itself, with real vLLM: killed and continued; with an adapter; refused."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rig.calls import get
from rig.ray_cluster import RayCluster
from rig.vllm_server import VllmServer
from stepwell.pool.actors import start_pool
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient
from tests.unit.trainers.models import one_turn

POOL, GROUPS = "trained", 4
VALIDATION = "def score():\n    return {'a': 0.25, 'b': 0.75}\n"


async def fill(pool: PoolClient, groups: range) -> None:
    for number in groups:
        prompt = f"p{number}"
        for n in range(2):
            uid = f"{prompt}-{n}"
            await pool.register_trajectory(Registration(uid, prompt, group_size=2))
            await pool.submit_steps([one_turn(uid, prompt, [1, 2, number], [3, 4 + n])])
            await pool.complete_trajectory(uid, prompt, float(n))


@pytest.fixture
async def pool(vllm: VllmServer, ray_cluster: RayCluster, namespace: str) -> PoolClient:
    start_pool(PoolPlan(name=POOL), namespace)
    client = PoolClient(POOL, namespace)
    await client.change_engines(add=(vllm.url,))
    return client


class Command:
    def __init__(self, folder: Path, model: Path, cluster: RayCluster, namespace: str) -> None:
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", "stepwell", "train", "--model", str(model), "--data-pool-name", POOL),
            *("--ray-address", cluster.address, "--ray-namespace", namespace),
            *("--groups", str(GROUPS), "--threads", "1", "--learning-rate", "1e-4"),
        ]

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self._command, *flags],
            cwd=self._folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    async def run(self, *flags: str, status: int = 0) -> str:
        started = self.start(*flags)
        printed, _ = await asyncio.to_thread(started.communicate, timeout=180)
        assert started.returncode == status, printed
        return printed


@pytest.fixture
def command(tmp_path: Path, tiny_model: Path, ray_cluster: RayCluster, namespace: str) -> Command:
    return Command(tmp_path, tiny_model, ray_cluster, namespace)


def updates_in(printed: str) -> list[int]:
    return [int(number) for number in re.findall(r"update +(\d+) of", printed)]


def until_line(lines: "Sequence[str] | subprocess.Popen[str]", wanted: str) -> str:
    """What a command has printed once a line has these words."""
    assert isinstance(lines, subprocess.Popen)
    assert lines.stdout is not None
    printed = ""
    for line in lines.stdout:
        printed += line
        if wanted in line:
            return printed
    raise AssertionError(printed)


@pytest.mark.usefixtures("weights")
async def test_a_killed_run_is_continued_by_the_same_command(
    pool: PoolClient, command: Command, vllm: VllmServer, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "held_out.py").write_text(VALIDATION)
    flags = ("--updates", "4", "--validate-with", "held_out.py:score", "--validate-every", "2")
    await fill(pool, range(2 * GROUPS))
    first = command.start(*flags)
    printed = await asyncio.to_thread(until_line, first, "waiting for a batch")  # the third, of which nothing is there
    first.send_signal(signal.SIGKILL)
    await asyncio.to_thread(first.wait, 60)
    assert first.stdout is not None
    first.stdout.close()
    await fill(pool, range(2 * GROUPS, 4 * GROUPS))

    continued = await command.run(*flags)

    assert updates_in(printed) == [1, 2]
    assert "training begins" in printed
    assert "validation after update 2: 0.500 over 2 tasks" in printed
    assert updates_in(continued) == [3, 4]
    assert "training continues after update 2" in continued
    metrics = [json.loads(line) for line in (tmp_path / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in metrics] == [1, 2, 3, 4]
    validations = (tmp_path / "training" / "validations.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in validations] == [0, 2, 4]
    stats = DataPool(pool).stats()
    assert stats.channels["train"].shipped.steps == 4 * GROUPS * 2
    assert (await get(f"{vllm.url}/weight_info")).json()["weight_version"] == str(stats.policy_version)
    trained, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "training/model", tiny_model))
    assert trained.keys() == before.keys()
    assert any(not trained[name].equal(before[name]) for name in before)
    assert (tmp_path / "training" / "model" / "config.json").is_file()


@pytest.mark.usefixtures("weights")
async def test_an_adapter_is_trained_and_reaches_the_engine_merged(
    pool: PoolClient, command: Command, vllm: VllmServer, tmp_path: Path, tiny_model: Path
) -> None:
    await fill(pool, range(100, 100 + GROUPS))

    printed = await command.run("--updates", "1", "--lora-rank", "2", "--out", "adapter")

    assert updates_in(printed) == [1]
    version = DataPool(pool).stats().policy_version
    assert (await get(f"{vllm.url}/weight_info")).json()["weight_version"] == str(version)
    trained, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "adapter/model", tiny_model))
    changed = {name for name in before if not trained[name].equal(before[name])}
    assert changed
    assert all("proj" in name for name in changed), "an adapter of linear layers changes nothing else"


async def test_a_run_that_gets_nothing_says_what_is_missing(
    pool: PoolClient, command: Command, weights: object
) -> None:
    printed = await command.run("--timeout", "6", status=1)

    assert "waiting for a batch" in printed
    assert f"of {GROUPS}" in printed or str(GROUPS) in printed.splitlines()[-1]
    assert "Traceback" not in printed


async def test_a_folder_without_a_model_is_refused(command: Command, pool: PoolClient, tmp_path: Path) -> None:
    printed = await command.run("--model", str(tmp_path), status=1)

    assert "is no model folder" in printed
    assert "Traceback" not in printed
