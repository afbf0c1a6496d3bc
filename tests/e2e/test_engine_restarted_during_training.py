"""T2, T8: two engines, one killed and restarted while a model is trained. Training goes on, the restarted engine serves
only after it has the trainer's weights, and every token was written by the weights of the version that its step names.
"""

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from openai import OpenAI, OpenAIError
from stepwell.pool.actors import start_pool
from transformers import AutoModelForCausalLM

import stepwell
from rig.gateways import gateway_process
from rig.ray_cluster import RayCluster
from rig.vllm_server import ENVIRONMENT, FLAGS, vllm_python
from rig.waiting import wait_until
from stepwell.demo.engine import StartingEngine, start_engine
from stepwell.errors import StepwellError
from stepwell.gateway.recording.step_book import BRACKET
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.client.batch import Batch
from stepwell.steps.step import Step
from stepwell.trainers.settings import Settings
from stepwell.trainers.trainer import AsyncTrainer
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import WeightSync, probe_logprobs

ALIKE = 1e-3
LEARNING_RATE = 3e-4
"""At ten times as much, the model becomes so steep within a few updates that float32 alone rounds its log-probabilities
60 times as far as before, and the kernels of engine and trainer differ by more than ALIKE."""
POOL = "restarted_engine"
AGENTS = 3
TOKENS = 24


class KeepingPool(DataPool):
    """Keeps the steps that a trainer got."""

    def __init__(self, client: PoolClient) -> None:
        super().__init__(client)
        self.steps: list[Step] = []

    def fetch_batch(self, count: int, **terms: Any) -> Batch:
        batch = super().fetch_batch(count, **terms)
        self.steps += [step for group in batch.groups() for rollout in group for step in rollout]
        return batch


@dataclass
class Agents:
    """They ask until the block ends. A call that was under way at the killed engine may fail."""

    gateway: str
    is_over: threading.Event = field(default_factory=threading.Event)
    may_ask: threading.Event = field(default_factory=threading.Event)
    """Cleared, they rest: an engine that starts needs the machine."""

    def __enter__(self) -> "Agents":
        self.may_ask.set()
        self._threads = [threading.Thread(target=self._run, args=(agent,)) for agent in range(AGENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.may_ask.set()
        for thread in self._threads:
            thread.join()

    def _run(self, agent: int) -> None:
        run, rewards, rollout = stepwell.connect(self.gateway), random.Random(agent), 0
        while self.may_ask.wait() and not self.is_over.is_set():
            try:
                with run.trajectory(prompt_uid=f"{agent}-{rollout // 2}", group_size=2) as t:
                    asked = [{"role": "user", "content": f"Tell me story {rollout // 2}."}]
                    with OpenAI(base_url=t.base_url, api_key=t.api_key, max_retries=0, timeout=30) as client:
                        client.chat.completions.create(model="tiny", messages=asked, max_tokens=TOKENS)  # type: ignore[arg-type]
                    t.reward = rewards.random()
                rollout += 1
            except (OpenAIError, StepwellError):
                rollout += 2 - rollout % 2  # another prompt: the rest of this group may never come


class Weights:
    """The trainer's weights of every version, to find out which of them wrote a token."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        self._kept[version] = {name: value.clone() for name, value in self._model.state_dict().items()}

    def gaps(self, step: Step, version: int) -> NDArray[np.float64]:
        """How far each token's recorded log-probability is from that under the weights of the version."""
        assert step.response_logprobs is not None
        self._model.load_state_dict(self._kept[version])
        ids = [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
        expected = probe_logprobs(self._model, ids)[len(step.prompt_ids) - 1 :]
        found: NDArray[np.float64] = np.abs(step.response_logprobs - np.array(expected))
        return found

    def _named_by(self, step: Step) -> Sequence[tuple[int, int, slice]]:
        """The oldest and the newest version that may have written each part of a response."""
        if step.version_spans:
            return [(span.version, span.version, slice(span.start, span.end)) for span in step.version_spans]
        bracket: Any = step.extras.get(BRACKET, [step.policy_version, max(self._kept)])
        return [(bracket[0], bracket[1], slice(None))]

    def contradict(self, step: Step) -> str:
        """How the weights contradict the versions that a step names; empty if they do not."""
        for first, last, part in self._named_by(step):
            gaps = np.min([self.gaps(step, version)[part] for version in range(first, last + 1)], axis=0)
            if gaps.max() > ALIKE:
                fitting = [version for version in self._kept if self.gaps(step, version)[part].max() <= ALIKE]
                return f"{first} to {last} is off by {gaps.max():.2g}, and {fitting} fit; {step.extras}"
        return ""


@pytest.fixture
def pool(ray_cluster: RayCluster, namespace: str) -> KeepingPool:
    start_pool(PoolPlan(name=POOL, limits=Limits(max_staleness=3)), namespace)
    return KeepingPool(PoolClient(POOL, namespace))


@pytest.fixture
def start(plain_models: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """Starts an engine with the first weights, at a given port or any."""
    with ExitStack() as engines:

        def begin(name: str, port: int | None = None) -> StartingEngine:
            flags = (*FLAGS, "--dtype", "float32")
            options: Any = {"python": vllm_python(), "flags": flags, "environment": ENVIRONMENT, "port": port}
            return engines.enter_context(start_engine(plain_models[0], log=tmp_path / f"{name}.log", **options))

        yield begin


def listed(gateway: str) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = httpx.get(f"{gateway}/engines").json()["engines"]
    return engines


def written_tokens(engine: str) -> float:
    lines = httpx.get(f"{engine}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


@pytest.mark.nightly
def test_every_token_has_the_version_of_the_weights_that_wrote_it(
    start: Any,
    pool: KeepingPool,
    ray_cluster: RayCluster,
    namespace: str,
    plain_models: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    staying, killed = start("staying"), start("killed")
    for engine in (staying, killed):
        engine.wait()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(plain_models[0], dtype=torch.float32)
    weights = Weights(model)
    sync = WeightSync(transfer=CheckpointTransfer(tmp_path / "w", like=plain_models[0]), pool=pool)
    settings = Settings(groups=2, learning_rate=LEARNING_RATE, final_rate=1.0, fetch_timeout=120.0)
    trainer = AsyncTrainer(pool, model, settings=settings, sync=sync, reports=[lambda m: weights.keep(m.version)])
    flags: dict[str, Any] = {"ray_address": ray_cluster.address, "ray_namespace": namespace, "data_pool_name": POOL}
    addresses = f"{staying.url},{killed.url}"
    with (
        gateway_process(
            tmp_path / "gateway.log", vllm_addresses=addresses, tokenizer_path=plain_models[0], **flags
        ) as gateway,
        Agents(gateway.url) as agents,
    ):
        wait_until(lambda: set(pool.engines()) == {staying.url, killed.url}, "the gateway to list its engines")
        weights.keep(0)
        trainer.start()
        for _ in range(3):
            trainer.step()
        os.killpg(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        for _ in range(2):
            trainer.step()
        wait_until(
            lambda: [engine["state"] for engine in listed(gateway.url)] == ["healthy", "down"],
            "the gateway to see that one engine is down",
        )
        agents.may_ask.clear()
        restarted = start("restarted", urlsplit(killed.url).port)
        restarted.wait()
        agents.may_ask.set()
        version_before = trainer.version
        for _ in range(4):
            trainer.step()
        wait_until(lambda: written_tokens(restarted.url) > 0, "the restarted engine to serve")
        for _ in range(6):
            trainer.step()
        versions = {staying.url: str(trainer.version), restarted.url: str(trainer.version)}
        wait_until(
            lambda: {engine["address"]: engine["weight_version"] for engine in listed(gateway.url)} == versions,
            "the gateway to see both engines at the trainer's version",
        )
    sync.close()
    steps = [step for step in pool.steps if step.quarantine is None]
    assert max(step.policy_version for step in steps) > version_before, "no step is from after the restart"
    wrong = [why for step in steps if (why := weights.contradict(step))]
    assert not wrong, f"{len(wrong)} of {len(steps)}: {wrong[:5]}"
    open_ended = [step for step in steps if not step.version_spans and BRACKET not in step.extras]
    assert len(open_ended) < len(steps) / 4, "the engines seldom told their version after a call"
    later = [step for step in steps if step.policy_version > 3]
    assert all(weights.gaps(step, 0).max() > 10 * ALIKE for step in later), "the versions are too alike to tell"
