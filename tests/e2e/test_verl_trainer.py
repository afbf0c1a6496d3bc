"""verl's own V1 trainer, in its own environment, learns the demo's tool task from the pool and syncs into real vLLM.

It is killed in the middle and started again by the same command. All of it takes many minutes, so `just nightly` runs
it; test_training_in_verl.py is its short form.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.util import list_named_actors
from stepwell.pool.actors import start_pool

from rig.ray_cluster import RayCluster
from rig.ray_nodes import joined_node
from rig.trainers.verl_run import ALIKE, RESOURCES, VerlRun, start_verl
from rig.vllm_server import vllm_python
from rig.waiting import wait_until
from stepwell.demo.agent_process import GROUP, AgentProcess, Orders, start_agents
from stepwell.demo.engine import start_engine
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.tasks import TASKS, shown, split
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient

TASK = "tool"
SEED = 0
GROUPS = 16
"""In a step."""
STEPS, KILLED_AFTER, SAVED_EVERY = 40, 15, 2
START_TIMEOUT = 420.0
"""Seconds. verl starts six processes, each of which imports torch."""
STEP_TIMEOUT = 60.0

pytestmark = pytest.mark.nightly


@dataclass(frozen=True, slots=True)
class Stage:
    """All that a trainer needs: a model, an engine that serves it, and agents that use it."""

    model: Path
    engine: str
    agents: AgentProcess
    pool_name: str
    cluster: RayCluster
    namespace: str
    folder: Path

    @property
    def pool(self) -> DataPool:
        return DataPool(PoolClient(self.pool_name, self.namespace))

    def start(self, name: str) -> VerlRun:
        """The command; a second one goes on where the first was killed."""
        overrides: dict[str, Any] = {
            "actor_rollout_ref.actor.optim.lr": 7e-4,
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "actor_rollout_ref.actor.clip_ratio_high": 0.28,
            "actor_rollout_ref.actor.ppo_mini_batch_size": GROUPS,
            "data.train_batch_size": GROUPS,
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": SAVED_EVERY,
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.v1.stepwell.pool": self.pool_name,
            "trainer.v1.stepwell.namespace": self.namespace,
            "trainer.v1.stepwell.engines": f"[{self.engine}]",
        }
        return start_verl(self.cluster.address, overrides, model=self.model, folder=self.folder, name=name)

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of the pool."""
        kept: dict[str, Any] = json.loads(
            (self.folder / "checkpoints" / f"global_step_{step}" / "stepwell.json").read_text()
        )
        return kept


@pytest.fixture
def stage(ray_cluster: RayCluster, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    torch.set_num_threads(1)  # as in the demo: more threads wait for each other where processes share the cores
    task = TASKS[TASK]
    samples, _ = split(task, SEED)
    network = make_model(SEED)
    warm_up(network, shown(task, samples, SEED))
    model = write_model(network, tmp_path / "model")
    pool_name = f"verl-{secrets.token_hex(4)}"
    limits = Limits(batch_size=GROUPS * GROUP, max_staleness=1, on_stale="keep")
    start_pool(PoolPlan(name=pool_name, limits=limits), namespace)
    with start_engine(model, python=vllm_python(), log=tmp_path / "vllm.log") as engine:
        engine.wait()
        orders = Orders(
            task=TASK,
            seed=SEED,
            engine=engine.url,
            tokenizer=str(model),
            ray_address=ray_cluster.address,
            ray_namespace=namespace,
            data_pool_name=pool_name,
        )
        with start_agents(orders, log=tmp_path / "agents.log") as agents, joined_node(**RESOURCES):
            agents.wait()
            yield Stage(model, engine.url, agents, pool_name, ray_cluster, namespace, tmp_path)


def test_verl_learns_the_tool_task_although_it_is_killed(stage: Stage) -> None:
    start = stage.agents.evaluate()
    stage.agents.train()
    metrics = train_and_kill(stage)
    stage.agents.stop()
    end = stage.agents.evaluate()

    assert len(metrics) == STEPS
    check_weights(metrics)
    assert stage.pool.stats().policy_version == metrics[-1]["stepwell/version"]
    check_nothing_was_lost_or_repeated(stage, metrics)
    assert end >= start + 0.3, (start, end)


def train_and_kill(stage: Stage) -> list[dict[str, Any]]:
    """The metrics of the steps that are in the weights at the end. The first run is killed when it has trained more
    than its last checkpoint contains."""
    first = stage.start("first")
    try:
        wait_until(
            lambda: len(first.metrics()) >= KILLED_AFTER or first.process.poll() is not None,
            "the first steps",
            START_TIMEOUT + KILLED_AFTER * STEP_TIMEOUT,
        )
        before = first.metrics()
        assert first.process.poll() is None, first.log.read_text()[-8000:]
    finally:
        first.kill()
    wait_until(lambda: not has_queue(), "Ray to end verl's processes", STEP_TIMEOUT)
    latest = int((stage.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    second = stage.start("second")
    after = second.wait(START_TIMEOUT + STEPS * STEP_TIMEOUT)
    assert [told["step"] for told in after] == list(range(latest + 1, STEPS + 1)), "it goes on from the checkpoint"
    lost = before[latest]
    for same in ("stepwell/reward", "stepwell/rows", "actor/grad_norm", "actor/lr"):
        assert after[0][same] == pytest.approx(lost[same], rel=1e-3), "the batch of the lost step is trained again"
    return [*(told for told in before if told["step"] <= latest), *after]


def has_queue() -> bool:
    """verl's TransferQueue, which has one name in a cluster."""
    return any(actor["namespace"] == "transfer_queue" for actor in list_named_actors(all_namespaces=True))


def check_weights(metrics: list[dict[str, Any]]) -> None:
    gaps = [told["stepwell/logprob_gap"] for told in metrics]
    assert max(gaps) < ALIKE, gaps
    assert min(told["stepwell/proven_tensors"] for told in metrics) > 0
    versions = [told["stepwell/version"] for told in metrics]
    assert all(earlier < later for earlier, later in pairwise(versions)), versions
    assert all(told["actor/grad_norm"] > 0 for told in metrics), "verl's own metrics are there too"


def check_nothing_was_lost_or_repeated(stage: Stage, metrics: list[dict[str, Any]]) -> None:
    """What the steps trained is what the last checkpoint names and what the pool has acknowledged, each once."""
    trained = stage.saved(len(metrics))["trajectories"]
    assert len(trained) == sum(told["stepwell/rollouts"] - told["stepwell/rollouts_again"] for told in metrics)
    stats = stage.pool.stats()
    assert stats.channels["train"].shipped.steps == sum(told["stepwell/steps"] for told in metrics)
    assert stats.leases == 0
