"""The command lines of Atropos' documentation, typed literally: its flags, its file, modules beside it, W&B."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rig.atropos.processes import atropos_python
from rig.rollout_server import FakeRolloutServer
from rig.threads import in_thread
from rig.waiting import wait_until
from rig.wandb_runs import wandb_history

BESIDE = """
def score_of(number):
    return float(number % 2)
"""
ENVIRONMENT = """
from beside import score_of
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class MyEnv(BaseEnv):
    name = "my_env"
    number = 0
    rollouts = 0

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2), [APIServerConfig(model_name="tiny", weight=1.0)]

    async def setup(self):
        pass

    async def get_next_item(self):
        self.number += 1
        return self.number

    async def collect_trajectory(self, item):
        self.rollouts += 1
        return {"tokens": [item, 7], "masks": [-100, 7], "scores": score_of(self.rollouts)}, []

    async def evaluate(self, *args, **kwargs):
        return {"eval/accuracy": 0.5}

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({**(wandb_metrics or {}), "train/numbers": self.number})

if __name__ == "__main__":
    MyEnv.cli()
"""
AS_IN_ATROPOS_README = """
env:
  group_size: 4
  max_batches_offpolicy: 3
  tokenizer_name: some/model
  use_wandb: true
  rollout_server_url: http://localhost:8000
  wandb_name: example_env
  ensure_scores_are_not_same: true
  data_path_to_save_groups: null
  include_messages: true
openai:
  - model_name: some/model
    base_url: http://localhost:9001/v1
    api_key: x
    weight: 1.0
slurm: false
testing: false
"""
"""The keys of the file that its README starts an environment with."""
NUMBERS = "example_env_0_train/numbers"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The environment's file, in another folder than the one in which the command is typed."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "beside.py").write_text(BESIDE)
    (folder / "my_env.py").write_text(ENVIRONMENT)
    return folder / "my_env.py"


@pytest.fixture(params=["written here", "Atropos' own"])
def config_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "Atropos' own":
        return atropos_python().parents[1] / "environments" / "configs" / "example.yaml"
    (tmp_path / "example.yaml").write_text(AS_IN_ATROPOS_README)
    return tmp_path / "example.yaml"


def typed(program: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "stepwell.envs", str(program), *words]


def offline(folder: Path) -> dict[str, str]:
    return {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}


def run(command: list[str], folder: Path) -> str:
    """What it said; it must end well."""
    done = subprocess.run(command, cwd=folder, env=offline(folder), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@asynccontextmanager
async def rollout_server(**trainer: Any) -> AsyncIterator[FakeRolloutServer]:
    async with FakeRolloutServer(**trainer).opened() as opened:
        yield opened


@contextmanager
def serving(command: list[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=offline(folder), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def train(server: FakeRolloutServer, process: "subprocess.Popen[bytes]", folder: Path, steps: int) -> None:
    """Takes a batch each time that the environment has paused, until the environment ends."""
    for step in range(steps):
        wait_until(lambda: process.poll() is not None or is_full(server), f"a full queue at step {step}", 120)
        assert process.poll() is None, (folder / "log").read_text()
        wait_until(partial(has_asked, server, server.status_calls + 3), "the full queue to be noticed", 30)
        server.train()
    assert process.wait(120) == 0, (folder / "log").read_text()


def has_asked(server: FakeRolloutServer, times: int) -> bool:
    return server.status_calls >= times


def is_full(server: FakeRolloutServer) -> bool:
    return len(server.queue) * 4 >= 3 * int(server.trainer["batch_size"])


def test_serve_with_a_port_and_the_file_of_atropos_readme(
    program: Path, config_file: Path, tmp_path: Path, tiny_model: Path
) -> None:
    with in_thread(rollout_server(num_steps=3, batch_size=8)) as server:
        command = typed(program, "serve", "--port", "8001", "--slurm", "false", "--config", str(config_file))
        command += ["--env.rollout_server_url", server.url, "--env.tokenizer_name", str(tiny_model)]
        with serving([*command, "--env.total_steps", "3"], tmp_path) as process:
            train(server, process, tmp_path, steps=3)
    assert {len(group["tokens"]) for group in server.taken} == {4}  # the file's group_size
    assert server.envs[0]["desired_name"] == "example_env"
    log = (tmp_path / "log").read_text()
    assert log.count("openai.weight: there is no such setting; it changes nothing") == 1
    assert "--port 8001 changes nothing" in log
    steps = [row for row in wandb_history(tmp_path) if row["_step"] > 0]
    assert len(steps) == 3
    numbers = [row[NUMBERS] for row in steps if NUMBERS in row]  # a step that began before new groups came has none
    assert numbers
    assert min(numbers) > 0


def test_pauses_resumes_and_the_queue_size_are_logged_to_wandb(program: Path, tmp_path: Path, tiny_model: Path) -> None:
    with in_thread(rollout_server(num_steps=3, batch_size=8)) as server:
        command = typed(program, "serve", "--env.rollout_server_url", server.url, "--env.use_wandb", "true")
        command += ["--env.group_size", "4", "--env.tokenizer_name", str(tiny_model), "--env.total_steps", "3"]
        with serving(command, tmp_path) as process:
            train(server, process, tmp_path, steps=3)
    history = wandb_history(tmp_path)
    queues = [row["my_env_0_pace/queue_size"] for row in history if row.get("my_env_0_pace/paused") == 1]
    assert len(queues) == 3
    assert min(queues) == 6, "three batches of 8 in groups of 4; groups under way may come on top"
    assert history[-1]["my_env_0_pace/pauses"] >= 3
    assert max(row["my_env_0_pace/resumes"] for row in history) >= 2


def test_process_logs_every_group_to_wandb(program: Path, tmp_path: Path, tiny_model: Path) -> None:
    command = typed(program, "process", "--groups", "3", "--env.max_num_workers", "1", "--env.use_wandb", "true")
    run([*command, "--env.tokenizer_name", str(tiny_model)], tmp_path)
    history = wandb_history(tmp_path)
    assert [(row["_step"], row["train/groups_sent"]) for row in history] == [(1, 1), (2, 2), (3, 3)]
    assert all(row["train/numbers"] > 0 and row["train/rollouts.nrows"] == 1 for row in history)


def test_evaluate_logs_its_result_to_wandb(program: Path, tmp_path: Path) -> None:
    assert "eval/accuracy 0.5" in run(typed(program, "evaluate", "--env.use_wandb", "true"), tmp_path)
    assert [row["eval/accuracy"] for row in wandb_history(tmp_path)] == [0.5]


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(typed(tmp_path / "no.py", "serve"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"stepwell.envs: there is no file {tmp_path / 'no.py'}\n"
