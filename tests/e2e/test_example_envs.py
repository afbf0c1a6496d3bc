"""The example environments with a real model behind the real gateway."""

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from rig.atropos.server import TRAINER, atropos_process
from rig.gateways import GatewayProcess
from rig.group_files import read_lines, read_table
from rig.ray_cluster import RayCluster
from rig.vllm_server import MODEL_NAME

FOLDER = Path(__file__).parents[2] / "examples" / "envs"
SHORT = {
    "arithmetic": "--env.answer-tokens 24",
    "calculator": "--env.turns 2 --env.turn-tokens 24",
    "word_game": "--env.rounds 2",
}
"""EnvFlags that keep conversations within the tiny model's window."""


def command(name: str, gateway: GatewayProcess, words: str) -> list[str]:
    server = f"--openai.base-url {gateway.url}/unrecorded/v1 --openai.model-name {MODEL_NAME}"
    kept = "--env.ensure-scores-are-not-same false"  # a model with random weights has no better and worse answers
    return [sys.executable, str(FOLDER / f"{name}.py"), *f"{words} {SHORT[name]} {server} {kept}".split()]


@pytest.mark.parametrize("name", SHORT)
def test_an_example_makes_groups_of_exact_tokens(
    name: str, gateway: GatewayProcess, tiny_model: Path, tmp_path: Path
) -> None:
    words = f"process --groups 2 --group-size 3 --out {tmp_path}/out --env.tokenizer-name {tiny_model}"
    done = subprocess.run(command(name, gateway, words), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    groups = list(read_lines(tmp_path / "out" / "groups.jsonl"))
    assert len(groups) == 2
    assert list(read_table(tmp_path / "out" / "groups.parquet")) == groups
    for group in groups:
        assert group["exactness"] == ["engine"] * 3
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            trained = [k for k, mask in enumerate(masks) if mask != -100]
            assert trained
            assert all(masks[k] == tokens[k] and logprobs[k] <= 0 for k in trained)
    page = (tmp_path / "out" / "groups.html").read_text()
    assert page.count("<article") == 2
    assert "<mark>" in page
    assert "user" in page


def train(url: str, steps: int, **run: Any) -> list[dict[str, Any]]:
    """Take so many batches; gives their groups."""
    with httpx.Client(base_url=url, timeout=120) as server:
        server.post("/register", json={**TRAINER, "num_steps": steps, **run})
        taken: list[dict[str, Any]] = []
        deadline = time.monotonic() + 120
        for step in range(steps):
            while (batch := server.get("/batch").json()["batch"]) is None:
                assert time.monotonic() < deadline, f"waited 120 s for batch {step}"
                time.sleep(0.1)
            taken += batch
        return taken


def test_the_first_serves_a_trainer_to_its_end(
    gateway: GatewayProcess, ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    opened = atropos_process(tmp_path / "atropos.log", ray_address=ray_cluster.address, ray_namespace=namespace)
    with opened as server, (tmp_path / "env.log").open("w+") as log:
        url = f"{server.url}/channel/{uuid.uuid4().hex}"
        words = f"serve --env.group-size 2 --env.total-steps -1 --env.rollout-server-url {url}"
        env = subprocess.Popen(command("arithmetic", gateway, words), cwd=tmp_path, stdout=log, stderr=log)
        try:
            checkpoints = {"checkpoint_dir": str(tmp_path / "run"), "save_checkpoint_interval": 1}
            groups = train(url, 3, batch_size=4, max_token_len=2048, **checkpoints)
            assert env.wait(60) == 0, (tmp_path / "env.log").read_text()
        finally:
            env.kill()
            env.wait()
    assert [len(group["scores"]) for group in groups] == [2] * 6
    assert len({json.dumps(group["tokens"]) for group in groups}) == 6
    assert all(versions == [0, 0] for versions in (group["policy_versions"] for group in groups))
    (*_, last) = sorted((tmp_path / "run").glob("env_checkpoints/*/step-*.json"))
    assert json.loads(last.read_text())["asked"] >= 6
