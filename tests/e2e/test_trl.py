"""TRL's AsyncGRPOTrainer, in its own environment, learns the demo's task from the pool and syncs into real vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from stepwell.demo.agent_process import AgentProcess, Orders, start_agents
from stepwell.demo.engine import start_engine
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.tasks import TASKS, shown, split
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.actor import start_pool
from tests.rig.ray_cluster import RayCluster
from tests.rig.trainers.process import answer_of, start_program
from tests.rig.vllm_server import vllm_python

POOL = "trl"
SEED = 0
UPDATES = 24
SAMPLES = 128
"""An update: as in the program that is run."""


@dataclass(frozen=True, slots=True)
class Stage:
    """All that a trainer needs: a model, an engine that serves it, and agents that use it."""

    model: Path
    engine: str
    agents: AgentProcess
    pool: DataPool


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = TASKS["rev"]
    samples, _ = split(task, SEED)
    model = make_model(SEED)
    warm_up(model, shown(task, samples, SEED))
    return write_model(model, tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture
def stage(warm_model: Path, ray_cluster: RayCluster, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    limits = Limits(batch_size=SAMPLES, max_staleness=4, on_stale="drop")
    start_pool(PoolPlan(name=POOL, limits=limits), namespace)
    with start_engine(warm_model, python=vllm_python(), log=tmp_path / "vllm.log") as engine:
        engine.wait()
        orders = Orders(
            task="rev",
            seed=SEED,
            engine=engine.url,
            tokenizer=str(warm_model),
            ray_address=ray_cluster.address,
            ray_namespace=namespace,
            data_pool_name=POOL,
        )
        with start_agents(orders, log=tmp_path / "agents.log") as agents:
            agents.wait()
            yield Stage(warm_model, engine.url, agents, DataPool(PoolClient(POOL, namespace)))


def test_trl_learns_from_the_pool_and_syncs_into_vllm(
    stage: Stage, ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    asked = {
        "pool": POOL,
        "address": ray_cluster.address,
        "namespace": namespace,
        "engine": stage.engine,
        "model": str(stage.model),
        "folder": str(tmp_path),
        "updates": UPDATES,
    }
    before = stage.agents.evaluate()
    log = tmp_path / "trl.log"
    trainer = start_program("trl", "with_trl.py", asked, log=log)
    stage.agents.train()
    answer = answer_of(trainer, log, timeout=600)
    stage.agents.stop()
    after = stage.agents.evaluate()

    assert answer["updates"] == UPDATES
    assert answer["version"] == stage.pool.stats().policy_version == UPDATES + 1, "once at the start, then every update"
    assert answer["missing"] == [], "TRL asks for what our classes do not have"
    assert abs(answer["kls"][0]) < 1e-4, "vLLM's log-probabilities are not TRL's, before anything was trained"
    assert fmean(answer["kls"][-5:]) < 0.03, "vLLM does not sample from the weights that TRL has by now"
    assert fmean(answer["rewards"][-5:]) > fmean(answer["rewards"][:5]) + 0.1, answer["rewards"]
    assert after > before + 0.1, (before, after)
    assert stage.pool.stats().channels["train"].shipped.steps >= UPDATES * SAMPLES
