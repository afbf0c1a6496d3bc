"""A program with every method that Atropos' document on BaseEnv names, started as `python your_env_module.py serve`."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rig.rollout_server import FakeRolloutServer
from rig.threads import in_thread
from rig.waiting import wait_until
from rig.wandb_runs import wandb_history
from stepwell.envs import BaseEnv, BaseEnvConfig, OpenaiConfig, ServerBaseline
from tests.integration.envs.counting import CountingEnv

PROGRAM = """
import os
from stepwell.envs import BaseEnv

def note(event):
    with open(os.environ["EVENTS"], "a") as file:
        file.write(f"{event}\\n")

class MyEnv(BaseEnv):
    name = "my_env"
    number = scored = 0

    async def setup(self):
        note("setup")

    async def get_next_item(self):
        self.number += 1
        note("no item" if self.number % 3 == 0 else "item")
        return None if self.number % 3 == 0 else self.number

    async def collect_trajectory(self, item):
        note(f"collect {item}")
        self.scored += 1
        more = [item + 1000] if item < 1000 and self.scored % 8 == 1 else []
        return {"tokens": [item, 7], "masks": [-100, 7], "scores": float(self.scored % 2)}, more

    async def postprocess_histories(self, trajectories):
        note("postprocess")
        return trajectories

    async def evaluate(self, *args, **kwargs):
        note("evaluate")

    async def wandb_log(self, wandb_metrics=None):
        if wandb_metrics is None:
            wandb_metrics = {}
        wandb_metrics["my_custom_metric"] = self.number
        await super().wandb_log(wandb_metrics)

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"number": self.number})

    async def cleanup(self):
        note("cleanup")

if __name__ == "__main__":
    MyEnv.cli()
"""
STEPS, GROUP = 4, 4
"""Training steps, with an evaluation and a checkpoint at every second one; rollouts of an item."""


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    (folder / "your_env_module.py").write_text(PROGRAM)
    env = {"EVENTS": str(folder / "events"), "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    command = [sys.executable, "your_env_module.py", "serve", "--port", "8001", *flags]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def train(server: FakeRolloutServer, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Takes a batch whenever there is one, until the environment ends with the last step."""

    def is_due() -> bool:
        assert process.poll() is None, log.read_text()
        return server.has_batch()

    for step in range(STEPS):
        wait_until(is_due, f"a batch for step {step}", 120)
        server.train()
        wait_until(partial(has_asked, server, server.status_calls + 2), "the step to be noticed", 60)
    assert process.wait(120) == 0, log.read_text()


def has_asked(server: FakeRolloutServer, times: int) -> bool:
    return server.status_calls >= times or bool(server.disconnected)


def test_the_documented_environment_is_served_with_all_its_methods_called(tmp_path: Path, tiny_model: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    trainer = FakeRolloutServer(num_steps=STEPS, save_checkpoint_interval=2, checkpoint_dir=checkpoints)
    with in_thread(trainer.opened()) as server:
        flags = f"--env.rollout_server_url {server.url} --env.group_size {GROUP} --env.use_wandb true "
        flags += f"--env.steps_per_eval 2 --env.total_steps {STEPS} --env.tokenizer_name {tiny_model} "
        flags += "--env.max_num_workers 2 --env.min_items_sent_before_logging 0"
        with serving(tmp_path, *flags.split()) as process:
            train(server, process, tmp_path / "log")
    assert server.disconnected == [0]
    assert {len(group["tokens"]) for group in server.taken} == {GROUP}

    events = Counter((tmp_path / "events").read_text().splitlines())
    items = {event: count for event, count in events.items() if event.startswith("collect ")}
    assert events["setup"] == 1
    assert events["no item"] > 0, "a worker that gets None waits, and asks again"
    assert set(items.values()) == {GROUP}
    assert any(int(event.split()[1]) > 1000 for event in items), "items of the backlog are rolled out"
    assert events["postprocess"] == events["cleanup"] == len(items)
    assert events["evaluate"] >= 1
    saved = {path.name: json.loads(path.read_text()) for path in checkpoints.rglob("step-*.json")}
    assert {"step-2.json", "step-4.json"} <= set(saved)
    assert all(state["number"] > 0 for state in saved.values())

    logged = {key for row in wandb_history(tmp_path) for key in row}
    assert "my_env_0_my_custom_metric" in logged
    assert {"my_env_0_train/groups_sent", "my_env_0_train_perf/task_duration_mean"} <= logged
    assert any(key.startswith("my_env_0_train/rollouts") for key in logged), "the table of rollouts"


def test_servers_are_a_baseline_or_a_list_of_configurations() -> None:
    class Served(CountingEnv):
        def __init__(self, servers: ServerBaseline | list[OpenaiConfig]) -> None:
            BaseEnv.__init__(self, BaseEnvConfig(), servers)

    named = [OpenaiConfig(model_name=name, base_url=f"http://{name}/v1") for name in ("a", "b")]
    assert [server.model_name for server in Served(named).server_configs] == ["a", "b"]
    assert [server.model_name for server in Served(ServerBaseline(model_name="c")).server_configs] == ["c"]


def test_a_file_that_imports_base_env_from_where_its_document_says_is_run(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "my_env.py"
    file.parent.mkdir()
    file.write_text(
        PROGRAM.replace("from stepwell.envs import BaseEnv", "from trajectoryhandler.envs.base import BaseEnv")
    )
    command = [sys.executable, "-m", "stepwell.envs", str(file), "process", "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (shown.returncode, "--env.group_size" in shown.stdout or "--env.group-size" in shown.stdout) == (0, True), (
        shown
    )
