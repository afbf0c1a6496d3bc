"""An environment, a real model behind a gateway, the Atropos server and a trainer: all groups arrive, each once."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.pool.actors import start_pool

from rig.atropos.server import TRAINER, atropos_process
from rig.gateways import gateway_process
from rig.ray_cluster import RayCluster
from rig.vllm_server import MODEL_NAME, VllmServer
from rig.waiting import wait_until
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient

ROOT = Path(__file__).parents[2]
MAX_STALENESS = 4
WORKERS = 4
BATCHES = 10
GROUPS_A_BATCH = 5
GROUP_SIZE = 2
AHEAD = 2
"""Batches that may wait for the trainer."""
STILL = 2.0
"""Seconds without a new group, where there were several a second."""


@dataclass(slots=True)
class Trainer:
    """Takes batches at its own pace; each makes a new version of the policy."""

    server: httpx.Client
    pool: DataPool
    engine: str
    """Its weights stay the same, and get the new version."""
    taken: list[dict[str, Any]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Of every sequence, how many versions old it was."""
    version: int = 0

    def register(self, batch_size: int, **changes: Any) -> None:
        self.server.post("/register", json={**TRAINER, "batch_size": batch_size, "max_token_len": 2048, **changes})

    def take(self) -> bool:
        batch = self.server.get("/batch").json()["batch"]
        if batch is None:
            return False
        self.lags += [self.version - version for group in batch for version in group["policy_versions"]]
        self.taken += batch
        return True

    def train(self, batches: int) -> None:
        for _ in range(batches):
            wait_until(self.take, f"batch {self.version + 1}")
            self.version += 1
            self.label(str(self.version))
            self.pool.set_policy_version(self.version)

    def label(self, version: str) -> None:
        httpx.post(f"{self.engine}/update_weight_version", json={"new_version": version}).raise_for_status()

    def waiting(self) -> int:
        """Groups that no one has taken."""
        return int(self.server.get("/status").json()["queue_size"])

    def pause(self) -> None:
        """Until the environment has filled what may wait, and has sent what was under way."""
        full = AHEAD * GROUPS_A_BATCH
        wait_until(lambda: self.waiting() >= full, "the environment to fill the queue")
        last, since = self.waiting(), time.monotonic()

        def is_still() -> bool:
            nonlocal last, since
            if (now := self.waiting()) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > STILL

        wait_until(is_still, "the environment to pause")
        assert last <= full + WORKERS


@contextmanager
def environment(server: str, gateway: str, folder: Path) -> "Iterator[subprocess.Popen[str]]":
    flags = {
        "env.rollout-server-url": server,
        "env.group-size": GROUP_SIZE,
        "env.max-num-workers": WORKERS,
        "env.max-batches-offpolicy": AHEAD,
        "env.ensure-scores-are-not-same": "false",
        "env.data-path-to-save-groups": folder / "begun.jsonl",
        "openai.base-url": f"{gateway}/unrecorded/v1",
        "openai.model-name": MODEL_NAME,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with (folder / "env.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rig.envs.numbered", "serve", *words],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def trainer(ray_cluster: RayCluster, namespace: str, vllm: VllmServer, tmp_path: Path) -> Iterator[Trainer]:
    start_pool(PoolPlan(name="env_loop", limits=Limits(max_staleness=MAX_STALENESS)), namespace)
    flags: dict[str, Any] = {
        "ray_address": ray_cluster.address,
        "ray_namespace": namespace,
        "data_pool_name": "env_loop",
        "state": tmp_path / "atropos.json",
    }
    with (
        atropos_process(tmp_path / "atropos.log", **flags) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        trainer = Trainer(http, DataPool(PoolClient("env_loop", namespace)), vllm.url)
        yield trainer
        trainer.label("default")


@pytest.fixture
def own_gateway(
    trainer: Trainer, ray_cluster: RayCluster, namespace: str, vllm: VllmServer, tiny_model: Path, tmp_path: Path
) -> Iterator[str]:
    with gateway_process(
        tmp_path / "gateway.log",
        data_pool_name="env_loop",
        vllm_addresses=vllm.url,
        tokenizer_path=tiny_model,
        ray_address=ray_cluster.address,
        ray_namespace=namespace,
    ) as gateway:
        yield gateway.url


def test_no_group_is_lost_or_comes_twice_while_the_trainer_pauses_and_the_environment_is_killed(
    trainer: Trainer, own_gateway: str, tmp_path: Path
) -> None:
    server = str(trainer.server.base_url).rstrip("/")
    checkpoints = {"checkpoint_dir": str(tmp_path / "run"), "save_checkpoint_interval": 2}
    trainer.register(GROUPS_A_BATCH * GROUP_SIZE, **checkpoints)
    with environment(server, own_gateway, tmp_path) as first:
        trainer.train(3)
        trainer.pause()
        trainer.train(2)
        first.send_signal(signal.SIGKILL)
        first.wait()
    with environment(server, own_gateway, tmp_path) as second:
        trainer.train(BATCHES - 5)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0, (tmp_path / "env.log").read_text()
    trainer.register(GROUP_SIZE)
    wait_until(lambda: not trainer.take(), "the last group")

    names = [group["group_overrides"]["name"] for group in trainer.taken]
    assert len(names) >= BATCHES * GROUPS_A_BATCH
    assert len(set(names)) == len(names), "a group came twice"
    begun = [
        json.loads(line)["group_overrides"]["name"] for line in (tmp_path / "begun.jsonl").read_text().splitlines()
    ]
    assert set(names) <= set(begun)
    assert len(set(begun) - set(names)) <= WORKERS, "more is missing than was under way when it was killed"
    kept = trainer.pool.stats().channels["train"]
    assert kept.accepted.steps == kept.shipped.steps == len(names) * GROUP_SIZE
    assert not kept.dropped
    assert 0 <= max(trainer.lags) <= MAX_STALENESS
    numbers = {group["overrides"][0]["number"] for group in trainer.taken}
    assert numbers == set(range(1, max(numbers) + 1)), "an item was left out after the restart"
    assert (tmp_path / "env.log").read_text().count("restored from") == 1
