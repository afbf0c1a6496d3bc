"""The commands in docs/export.md, run as they stand there. Only data, model and Ray's address are the test's."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import polars as pl
import pyarrow.parquet as pq
import pytest

from rig.builders import make_group, make_step
from rig.ray_cluster import RayCluster
from rig.vocabulary import encode
from stepwell.pool.client.batch import make_batch
from stepwell.steps.columns import pack
from stepwell.steps.step import Exactness
from tests.integration.exports.commands import new_pool

PAGE = Path(__file__).parents[3] / "docs" / "export.md"
Shell: TypeAlias = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an archive of one group, whose two answers earned 1 and 0."""
    answers = enumerate((("4", 1.0), ("5", 0.0)))
    steps = [
        make_step(
            f"q-{n}",
            "q",
            prompt_ids=encode("2+2="),
            response_ids=encode(text),
            step_index=0,
            is_last=True,
            reward=reward,
        )
        for n, (text, reward) in answers
    ]
    (tmp_path / "archive").mkdir()
    pq.write_table(make_batch(pack(steps), [2]).to_arrow(), tmp_path / "archive" / "data_pool-1.parquet")
    return tmp_path


@pytest.fixture
def shell(ray_cluster: RayCluster, namespace: str, tiny_model: Path, folder: Path) -> Shell:
    settings = {"RAY_ADDRESS": ray_cluster.address, "RAY_NAMESPACE": namespace}
    told = {f"STEPWELL_{command}_{name}": value for command in ("EXPORT", "IMPORT") for name, value in settings.items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **told, "PATH": path, "MODEL": str(tiny_model), "HF_HOME": str(folder / "hf")}

    def run(words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)

    return run


async def test_every_command_does_what_the_page_says(folder: Path, shell: Shell, namespace: str) -> None:
    pool = new_pool("data_pool", namespace)
    await pool.submit_groups(*make_group("p", 2, exactness=Exactness.ENGINE))
    for block in examples("bash"):
        ran = await asyncio.to_thread(shell, ["bash", "-ec", block])
        assert ran.returncode == 0, (block, ran.stderr)

    assert pl.read_parquet(folder / "steps.parquet")["trajectory_uid"].to_list() == ["p-0", "p-1"]
    assert pl.read_ndjson(folder / "good.jsonl")["exactness"].to_list() == ["engine", "engine"]
    imitated = pl.read_parquet(folder / "sft.parquet")
    assert imitated.select("prompt", "completion", "reward").rows() == [("2+2=", "4", 1.0)]
    pairs = pl.read_parquet(folder / "pairs.parquet")
    assert pairs.select("prompt", "chosen", "rejected", "chosen_uid").rows() == [("2+2=", "4", "5", "q-0")]
    assert (await pool.stats()).channels["replay"].ready_groups == 1


def test_the_readers_on_the_page_read_a_dataset(shell: Shell) -> None:
    (program,) = examples("python")
    made = shell(["stepwell", "export", "--from", "archive", "--to", "folder"])
    assert made.stdout.startswith("wrote folder: 2 rows of 2 trajectories, 2 steps"), made.stderr
    ran = shell([sys.executable, "-c", f"{program}\nprint(len(steps), rewards['reward'].to_list())"])
    assert ran.stdout.splitlines()[-1:] == ["2 [0.5]"], ran.stderr
