"""What remains of an environment whose process is killed, and what it goes on with."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rig.rollout_server import FakeRolloutServer
from rig.waiting import until

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def environment(url: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    program = [sys.executable, "-m", "tests.integration.envs.counting", url]
    process = subprocess.Popen(program, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_checkpoint_is_restored_in_a_new_process_after_sigkill(tmp_path: Path) -> None:
    trainer = FakeRolloutServer(batch_size=4, save_checkpoint_interval=2, checkpoint_dir=tmp_path)
    folder = tmp_path / "env_checkpoints" / "counting_0"
    async with trainer.opened() as rollouts:
        with environment(rollouts.url, tmp_path) as first:
            for _ in range(2):
                await until(rollouts.has_batch, "a batch")
                rollouts.train()
            await until((folder / "step-2.json").exists, "a checkpoint")
            first.send_signal(signal.SIGKILL)
            first.wait()
        kept = json.loads((folder / "step-2.json").read_text())
        seen, rollouts.queue = len(rollouts.taken), []
        with environment(rollouts.url, tmp_path):
            await until(lambda: len(rollouts.taken) > seen + 2, "groups of the new process")
        items = [group["tokens"][0][0] for group in rollouts.taken[seen:]]
        assert rollouts.envs[1]["desired_name"] == "counting"
        assert min(items) == min([kept["position"], *kept.get("backlog", [])]) > 0


async def test_two_living_environments_of_one_name_keep_their_checkpoints_apart(tmp_path: Path) -> None:
    trainer = FakeRolloutServer(batch_size=4, save_checkpoint_interval=1, checkpoint_dir=tmp_path)
    root = tmp_path / "env_checkpoints"
    async with trainer.opened() as rollouts:
        with environment(rollouts.url, tmp_path):
            await until(rollouts.has_batch, "a batch")
            rollouts.train()
            await until((root / "counting_0" / "step-1.json").exists, "the first one's checkpoint")
            with environment(rollouts.url, tmp_path):
                await until(lambda: len(rollouts.envs) == 2, "the second one")

                def has_sent() -> bool:
                    if rollouts.has_batch():
                        rollouts.train()
                    return any(group["env_id"] == 1 for group in rollouts.taken)

                await until(has_sent, "groups of the second one")
                await until(lambda: any((root / "counting_1").glob("step-*.json")), "the second one's checkpoint")
        first_of_second = next(group for group in rollouts.taken if group["env_id"] == 1)
        assert first_of_second["tokens"][0][0] in (0, 1)


async def test_sigterm_ends_it_well(tmp_path: Path) -> None:
    async with FakeRolloutServer(checkpoint_dir=tmp_path).opened() as rollouts:
        with environment(rollouts.url, tmp_path) as process:
            await until(lambda: len(rollouts.taken) >= 2, "work")
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None, "its end")
            assert process.returncode == 0
        assert rollouts.disconnected == [0]
        kept = json.loads((tmp_path / "env_checkpoints" / "counting_0" / "step-0.json").read_text())
        assert kept == {"position": len(rollouts.taken)}
