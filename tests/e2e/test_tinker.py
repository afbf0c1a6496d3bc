"""Two tenants learn opposite tasks side by side by examples/tinker: one Tinker service, one base model, one vLLM, one
pool."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
from stepwell.pool.actors import start_pool

from rig.gateways import gateway_process
from rig.ray_cluster import RayCluster
from rig.trainers.process import DEFAULT
from rig.trainers.skyrl_server import SkyrlServer, start_skyrl
from rig.trainers.tinker_run import TinkerRun, start_tinker
from rig.two_tenants import GROUP, WANTED, Tenants, held_out_answers, logprob_gap, make_base_model, reward
from rig.vllm_server import VllmServer, start_vllm
from rig.waiting import until
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.trainers.feed import read_state
from stepwell.trainers.tinker.tinker_loop import FILE, TinkerRecord

pytestmark = pytest.mark.nightly

POOL = "data_pool"
RANK = 8
GROUPS = 8
"""Of an update."""
ROWS = GROUPS * GROUP
UPDATES = 40
ENOUGH = 0.3
"""How much better each tenant's adapter must become."""
ALIKE = 1e-3
SETTINGS = {
    "groups": GROUPS,
    "rank": RANK,
    "loss": "ppo",
    "learning_rate": 1e-3,
    "service_loss": "mean",
    "rows_multiple": ROWS,
    "logprob_tolerance": ALIKE,
}
LORA = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "8")
"""Room for the three that each tenant may have for a moment."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Two tenants in front of a gateway, with all but the service and the trainer."""

    model: Path
    engine: VllmServer
    gateway: str
    pool: DataPool
    address: str

    def serve(self, folder: Path) -> AbstractContextManager[SkyrlServer]:
        return start_skyrl(self.model, folder / "skyrl", rank=RANK, rows=ROWS)

    def train(self, service: SkyrlServer, folder: Path, updates: int) -> TinkerRun:
        run = {
            "service": service.url,
            "model": str(self.model),
            "folder": str(folder),
            "channels": list(WANTED),
            "updates": updates,
        }
        return start_tinker(run, SETTINGS, address=self.address, log=folder / f"trainer-{updates}.log")

    async def train_with_agents(self, service: SkyrlServer, folder: Path, updates: int, within: float) -> TinkerRun:
        """The agents begin when both channels have an adapter, so that adapters have sampled what is trained."""
        trainer = self.train(service, folder, updates)
        try:
            await until(lambda: trainer.is_over() or self.has_adapters(), "adapters of both channels", within)
            async with Tenants(self.gateway) as tenants:
                await asyncio.to_thread(trainer.wait, within)
                tenants.check()
                return trainer
        finally:
            trainer.kill()

    async def train_until(self, service: SkyrlServer, folder: Path, update: int, within: float) -> None:
        """Kills the trainer as soon as both channels have a record of that update."""
        trainer = self.train(service, folder, UPDATES)
        try:
            async with Tenants(self.gateway):
                await until(lambda: trainer.is_over() or have_reached(folder, update), f"update {update}", within)
        finally:
            trainer.kill()
        assert have_reached(folder, update), trainer.log.read_text()[-8000:]

    def has_adapters(self) -> bool:
        return all(self.adapters().values())

    def adapters(self) -> dict[str, str]:
        return {channel: self.pool.channel_policy(channel).adapter for channel in WANTED}


@pytest.fixture(scope="module")
def namespace(ray_cluster: RayCluster) -> Iterator[str]:
    """Where the example looks for its pool."""
    with ray_cluster.namespace(DEFAULT) as name:
        yield name


@pytest.fixture(scope="module")
def stage(ray_cluster: RayCluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("tinker")
    model = make_base_model(folder / "model")
    start_pool(PoolPlan(name=POOL, limits=Limits(batch_size=ROWS, max_staleness=1, on_stale="drop")), namespace)
    with (
        start_vllm(
            model,
            log=folder / "vllm.log",
            flags=(*LORA, "--max-model-len", "256"),
            environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        ) as engine,
        gateway_process(
            folder / "gateway.log",
            data_pool_name=POOL,
            vllm_addresses=engine.url,
            tokenizer_path=model,
            prompt_length=256,
            response_length=256,
            ray_address=ray_cluster.address,
            ray_namespace=namespace,
        ) as gateway,
    ):
        pool = DataPool(PoolClient(POOL, namespace))
        yield Stage(model, engine, gateway.url, pool, ray_cluster.address)


def records(folder: Path) -> dict[str, TinkerRecord]:
    """Of the channels that have one."""
    found = {channel: read_state(TinkerRecord, folder / channel / FILE) for channel in WANTED}
    return {channel: record for channel, record in found.items() if record is not None}


def have_reached(folder: Path, update: int) -> bool:
    return [record.update >= update for record in records(folder).values()] == [True] * len(WANTED)


async def test_two_tenants_learn_opposite_tasks_on_one_vllm(stage: Stage, tmp_path: Path) -> None:
    untrained = await held_out_answers(stage.engine.url, [stage.engine.model_name])
    base = {channel: reward(untrained[stage.engine.model_name], channel) for channel in WANTED}
    with stage.serve(tmp_path) as service:
        run = await stage.train_with_agents(service, tmp_path, UPDATES, within=3600)
    adapters = stage.adapters()
    trained = await held_out_answers(stage.engine.url, list(adapters.values()))
    learned = {
        (channel, judged): reward(trained[adapter], judged)
        for channel, adapter in adapters.items()
        for judged in WANTED
    }
    for channel, other in (("east", "west"), ("west", "east")):
        updates, adapter = run.updates(channel), adapters[channel]
        assert updates[-1]["version"] == 1 + sum(update["rows"] > 0 for update in updates)
        assert learned[channel, channel] >= base[channel] + ENOUGH, (base, learned)
        assert learned[channel, other] < base[other], "the other tenant's task was learned too"
        rewards = [update["reward"] for update in updates]
        assert fmean(rewards[-5:]) >= fmean(rewards[:3]) + ENOUGH, rewards
        assert logprob_gap(trained[adapter], stage.model, tmp_path / "adapters" / adapter) <= ALIKE
        gaps = [update["logprob_gap"] for update in updates if update["logprob_gap"] is not None]
        assert gaps, "nothing that the newest adapter sampled was trained"
        assert max(gaps) <= ALIKE


async def test_a_killed_trainer_and_a_killed_service_continue_with_the_same_weights(
    stage: Stage, tmp_path: Path
) -> None:
    with stage.serve(tmp_path) as service:
        await stage.train_until(service, tmp_path, update=2, within=900)
        service.kill()
    killed = records(tmp_path)
    versions = {channel: stage.pool.channel_policy(channel).version for channel in WANTED}
    published = stage.adapters()
    with stage.serve(tmp_path) as service:
        for channel, record in killed.items():
            assert record.version - versions[channel] in (0, 1), "killed after the record and before the adapter"
        last = max(record.update for record in killed.values())
        run = await stage.train_with_agents(service, tmp_path, last + 2, within=900)
    for channel, record in killed.items():
        numbers = [update["update"] for update in run.updates(channel)]
        assert numbers == list(range(record.update + 1, last + 3))
        if record.version == versions[channel]:
            assert published[channel] in run.published(channel), "the weights are not those of before"
        gaps = [update["logprob_gap"] for update in run.updates(channel) if update["logprob_gap"] is not None]
        assert max(gaps, default=0.0) <= ALIKE
