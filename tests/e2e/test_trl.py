"""TRL's AsyncGRPOTrainer in examples/trl, in its own environment, learns the demo's task from the pool and syncs into
real vLLM.

Meanwhile, the dashboard has something to show: real agents, real vLLM, a model that learns. `just nightly` runs it. In
CI the same trainer is killed and resumed (test_trl_killed.py), and trains adapters (test_trl_lora.py);
tests/examples has the short form of this one.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect
from stepwell.pool.actors import start_pool
from transformers import AutoModelForCausalLM

from rig.browser import open_browser, open_page
from rig.gateways import free_port
from rig.ray_cluster import RayCluster
from rig.trainers.process import DEFAULT, PROGRAMS, answer_of, start_command
from rig.vllm_server import vllm_python
from rig.watched_demo import demo_dashboard
from stepwell.demo.agent_process import VALIDATION, AgentProcess, Orders, start_agents
from stepwell.demo.engine import start_engine
from stepwell.demo.model import make_model, warm_up, write_model
from stepwell.demo.tasks import HELD_OUT, TASKS, shown, split
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.steps.step import Step
from stepwell.trainers.weight_sync import probe_logprobs

pytestmark = pytest.mark.nightly

POOL = "data_pool"
SEED = 0
UPDATES = 24
SAMPLES = 128
"""An update."""
FLAGS = (
    *(f"--max_steps {UPDATES} --per_device_train_batch_size {SAMPLES} --save_strategy no --logging_steps 1".split()),
    *"--learning_rate 5e-4 --lr_scheduler_type constant --adam_beta2 0.95 --epsilon 0.2 --epsilon_high 0.28".split(),
    *"--use_cpu true --bf16 false --gradient_checkpointing false --token_budget 0".split(),
    *"--report_to none --disable_tqdm true".split(),
)
"""Of the example: the demo's settings, and a CPU's."""
ALIKE = 1e-3
"""What float32 on two sides differs by at most; one update moves the log-probabilities by more."""


@dataclass(frozen=True, slots=True)
class Stage:
    """All that a trainer needs: a model, an engine that serves it, and agents that use it."""

    model: Path
    engine: str
    agents: AgentProcess
    pool: DataPool


@dataclass(frozen=True, slots=True)
class Training:
    """A trainer that has been started, and what the agents were worth before."""

    process: "subprocess.Popen[str]"
    log: Path
    trained: Path
    """The folder of its weights, at the end."""
    before: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def namespace(ray_cluster: RayCluster) -> Iterator[str]:
    """Where the example looks for its pool."""
    with ray_cluster.namespace(DEFAULT) as name:
        yield name


@pytest.fixture(scope="module")
def warm_model(folder: Path) -> Path:
    task = TASKS["rev"]
    samples, _ = split(task, SEED)
    model = make_model(SEED)
    warm_up(model, shown(task, samples, SEED))
    return write_model(model, folder / "model")


@pytest.fixture(scope="module")
def stage(warm_model: Path, ray_cluster: RayCluster, namespace: str, folder: Path) -> Iterator[Stage]:
    limits = Limits(batch_size=SAMPLES, max_staleness=4, on_stale="drop")
    start_pool(PoolPlan(name=POOL, limits=limits), namespace)
    with start_engine(warm_model, python=vllm_python(), log=folder / "vllm.log") as engine:
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
        with start_agents(orders, log=folder / "agents.log") as agents:
            agents.wait()
            yield Stage(warm_model, engine.url, agents, DataPool(PoolClient(POOL, namespace)))


@pytest.fixture(scope="module")
def training(stage: Stage, ray_cluster: RayCluster, folder: Path) -> Iterator[Training]:
    out, log = folder / "trl", folder / "trl.log"
    command = ["python", PROGRAMS / "with_trl.py", "--model", stage.model, "--output_dir", out, *FLAGS]
    before = stage.agents.evaluate()
    trainer = start_command("trl", command, address=ray_cluster.address, log=log)
    try:
        stage.agents.train()
        yield Training(trainer, log, out / "trained", before)
    finally:
        trainer.kill()
        trainer.wait()


@pytest.fixture
def dashboard(stage: Stage, training: Training, ray_cluster: RayCluster, namespace: str, folder: Path) -> Iterator[str]:
    port = free_port()
    flags = {
        "port": port,
        "data-pool-name": POOL,
        "ray-address": ray_cluster.address,
        "ray-namespace": namespace,
    }
    with demo_dashboard(stage.model, folder / "dashboard.log", flags):
        yield f"http://127.0.0.1:{port}"


def test_every_view_of_the_dashboard_has_something_to_show_while_a_model_learns(dashboard: str) -> None:
    with open_browser() as browser, open_page(browser, dashboard) as (page, faults):
        page.goto(dashboard)
        see_the_overview(page)
        see_a_trajectory(page, dashboard)
        see_a_group(page)
        see_a_decision(page)
        assert faults.none()


def see_the_overview(page: Page) -> None:
    expect(page.locator("table", has_text="Engines")).to_contain_text("healthy")
    for chart in ("Steps", "Tokens", "Reward", "Staleness", "Queue", "Oldest", "Gateway"):
        expect(page.locator(f"figure[aria-label^={chart}] .canvas:not(.empty)")).to_be_visible()


def see_a_trajectory(page: Page, url: str) -> None:
    page.goto(f"{url}/#/trajectories?channel=validation")
    expect(page.locator("td.uid").first).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".turn.response").first).to_be_visible()
    page.keyboard.press("t")
    expect(page.locator(".tokens .tok").first).to_be_visible()


def see_a_group(page: Page) -> None:
    page.keyboard.press("s")
    expect(page.locator(".rollout pre").first).to_be_visible()


def see_a_decision(page: Page) -> None:
    page.keyboard.press("r")
    page.get_by_role("dialog").get_by_label("Who").fill("ada")
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_contain_text("1 done")
    expect(page.locator(".rollout.current")).to_contain_text("rejected")
    page.keyboard.press("g")
    page.keyboard.press("a")
    expect(page.locator("main tbody tr").first).to_contain_text("ada")


def answers_of(pool: DataPool, version: int) -> list[Step]:
    """The held-out answers of these weights; those from before the training are stale by now, and dropped."""
    answers = pool.fetch_batch(HELD_OUT, channel=VALIDATION).steps()
    assert {step.policy_version for step in answers} == {version}
    return answers


def largest_gap(answers: list[Step], model: Path) -> float:
    """Between vLLM's log-probabilities of what it sampled, and those of the weights in a folder."""
    weights: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gaps = []
    for step in answers:
        assert step.response_logprobs is not None
        expected = probe_logprobs(weights, [*step.prompt_ids.tolist(), *step.response_ids.tolist()])
        gaps.append(np.abs(step.response_logprobs - expected[len(step.prompt_ids) - 1 :]).max())
    return float(max(gaps))


def test_trl_learns_from_the_pool_and_syncs_into_vllm(stage: Stage, training: Training) -> None:
    answer = answer_of(training.process, training.log, timeout=600)
    stage.agents.stop()
    after = stage.agents.evaluate()

    assert answer["updates"] == UPDATES
    assert stage.pool.stats().policy_version == UPDATES + 1, "once at the start, then every update"
    assert answer["missing"] == [], "TRL asks for what our classes do not have"
    assert abs(answer["kls"][0]) < 1e-4, "vLLM's log-probabilities are not TRL's, before anything was trained"
    answers = answers_of(stage.pool, UPDATES + 1)
    assert largest_gap(answers, training.trained) < ALIKE, "vLLM does not sample from the weights that TRL has"
    assert largest_gap(answers, stage.model) > 10 * ALIKE, "the weights have hardly changed: a gap would not show"
    assert fmean(answer["rewards"][-5:]) > fmean(answer["rewards"][:5]) + 0.1, answer["rewards"]
    assert after > training.before + 0.1, (training.before, after)
    assert stage.pool.stats().channels["train"].shipped.steps >= UPDATES * SAMPLES
