"""An environment as a process of its own: how fast it answers, how it ends, what a terminal and wandb see."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rig.fake_engine import FakeEngine
from rig.group_files import read_lines, read_table
from rig.rollout_server import FakeRolloutServer
from rig.threads import in_thread
from rig.waiting import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "envs" / "arithmetic.py"
MADE_UP = """
import asyncio
from stepwell.envs import BaseEnv

class MadeUp(BaseEnv):
    number = 0

    async def get_next_item(self):
        self.number += 1
        return self.number

    async def collect_trajectory(self, item):
        await asyncio.sleep(0.01)
        return {"tokens": [item, 7], "masks": [-100, 7], "scores": 1.0}, []

MadeUp.cli()
"""
SAME = "--env.ensure-scores-are-not-same=false"


def made_up(folder: Path, *words: str) -> list[str]:
    (folder / "made_up.py").write_text(MADE_UP)
    return [sys.executable, str(folder / "made_up.py"), *words, SAME]


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]])
def test_help_does_not_wait_for_large_packages(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", str(EXAMPLE), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "stepwell" in imported
    assert not imported & {"ray", "torch", "transformers", "vllm", "pandas", "pyarrow", "wandb"}


def test_an_interrupt_ends_the_writing_and_what_was_written_is_whole(tmp_path: Path) -> None:
    process = subprocess.Popen(made_up(tmp_path, "process", "--groups", "100000"), cwd=tmp_path)
    lines = tmp_path / "groups" / "groups.jsonl"
    try:
        wait_until(lambda: lines.exists() and lines.stat().st_size > 1_000, "some groups")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    written = list(read_lines(lines))
    assert 0 < len(written) < 100_000
    assert list(read_table(tmp_path / "groups" / "groups.parquet")) == written
    assert f"Groups: {len(written)}." in (tmp_path / "groups" / "groups.html").read_text()


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    command = made_up(tmp_path, "process", "--groups", "40")
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65_536):
            shown += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(30) == 0
    text = shown.decode()
    assert "MadeUp" in text
    assert "40/40" in text
    assert "delivered 40" in text
    assert "40 groups in groups; to read: groups/groups.html" in text


@asynccontextmanager
async def training() -> AsyncIterator[tuple[FakeEngine, FakeRolloutServer]]:
    server = FakeRolloutServer(num_steps=3, batch_size=8)
    async with FakeEngine() as engine, server.opened():
        yield engine, server


def test_a_run_is_kept_for_wandb_offline(tmp_path: Path, tiny_model: Path) -> None:
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    with in_thread(training()) as (engine, server), (tmp_path / "log").open("w+") as log:
        words = f"serve {SAME} --env.group-size 4 --env.total-steps -1 --env.max-token-length 256 --env.use-wandb true"
        words += f" --env.rollout-server-url {server.url} --env.answer-tokens 8 --env.tokenizer-name {tiny_model}"
        words += f" --openai.base-url {engine.url}/v1 --openai.model-name tiny"
        server.trainer["max_token_len"] = 256
        process = subprocess.Popen([sys.executable, str(EXAMPLE), *words.split()], cwd=tmp_path, env=env, stderr=log)
        try:
            for step in range(3):
                wait_until(lambda: server.has_batch() or process.poll() is not None, f"batch {step}")
                assert process.poll() is None, (tmp_path / "log").read_text()
                server.train()
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/groups_sent" in run.read_bytes()
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/*train/rollouts*.json"))
    assert any("What is" in table.read_text() for table in tables)
