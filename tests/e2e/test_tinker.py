"""Two tenants learn opposite tasks side by side: one Tinker service, one base model, one vLLM, one pool."""

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.actor import start_pool
from tests.e2e.two_tenants import GROUP, WANTED, Tenants, held_out_reward, make_base_model
from tests.rig.calls import get
from tests.rig.gateways import gateway_process
from tests.rig.ray_cluster import RayCluster
from tests.rig.trainers.process import answer_of, start_program
from tests.rig.trainers.skyrl_server import SkyrlServer, start_skyrl
from tests.rig.vllm_server import VllmServer, start_vllm
from tests.rig.waiting import until

POOL = "tinker"
RANK = 8
GROUPS = 8
"""Of an update."""
SMOKE_UPDATES, NIGHTLY_UPDATES = 2, 40
ENOUGH = 0.3
"""How much better each tenant's adapter must become."""
ALIKE = 1e-3
SETTINGS = {
    "groups": GROUPS,
    "rank": RANK,
    "learning_rate": 5e-3,
    "rows_multiple": GROUPS * GROUP,
    "logprob_tolerance": ALIKE,
}
LORA = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4", "--max-cpu-loras", "8")


@dataclass(frozen=True, slots=True)
class Stage:
    model: Path
    engine: VllmServer
    service: SkyrlServer
    gateway: str
    pool: DataPool
    address: str
    namespace: str

    def train(self, folder: Path, updates: int) -> "tuple[subprocess.Popen[str], Path]":
        folder.mkdir(exist_ok=True)
        asked = {
            "pool": POOL,
            "address": self.address,
            "namespace": self.namespace,
            "service": self.service.url,
            "model": str(self.model),
            "folder": str(folder),
            "channels": list(WANTED),
            "updates": updates,
            "settings": SETTINGS,
        }
        log = folder / f"trainer-{updates}.log"
        return start_program("skyrl", "with_tinker.py", asked, log=log), log

    async def train_with_agents(self, folder: Path, updates: int, within: float) -> Any:
        """The agents begin when both channels have an adapter, so that adapters have sampled what is trained."""
        trainer, log = self.train(folder, updates)
        try:
            await until(lambda: trainer.poll() is not None or self.has_adapters(), "adapters of both channels", within)
            async with Tenants(self.gateway) as tenants:
                answer = await asyncio.to_thread(answer_of, trainer, log, timeout=within)
                tenants.check()
                return answer
        finally:
            trainer.kill()
            trainer.wait()

    def has_adapters(self) -> bool:
        return all(self.pool.channel_policy(channel).adapter for channel in WANTED)


@pytest.fixture(scope="module")
def stage(ray_cluster: RayCluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("tinker")
    model = make_base_model(folder / "model")
    start_pool(
        PoolPlan(name=POOL, limits=Limits(batch_size=GROUPS * GROUP, max_staleness=4, on_stale="drop")), namespace
    )
    with (
        start_skyrl(model, folder / "skyrl", rank=RANK, rows=GROUPS * GROUP) as service,
        start_vllm(
            model,
            log=folder / "vllm.log",
            in_one_process=True,
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
        yield Stage(model, engine, service, gateway.url, pool, ray_cluster.address, namespace)


def of(channel: str, answer: Any) -> list[Any]:
    return [update for update in answer["updates"] if update["channel"] == channel]


@pytest.mark.nightly
async def test_two_tenants_train_side_by_side_and_continue_where_they_ended(stage: Stage, tmp_path: Path) -> None:
    """The short form: two updates, then one more by another process."""
    answer = await stage.train_with_agents(tmp_path, SMOKE_UPDATES, within=900)
    for channel in WANTED:
        assert [update["version"] for update in of(channel, answer)] == [2, 3]
        gaps = [update["logprob_gap"] for update in of(channel, answer)]
        assert any(gap is not None for gap in gaps), "nothing that an adapter sampled was trained"
    adapters = {channel: answer["policies"][channel]["adapter"] for channel in WANTED}
    served = (await get(f"{stage.engine.url}/v1/models")).json()["data"]
    assert set(adapters.values()) <= {card["id"] for card in served}

    resumed = await stage.train_with_agents(tmp_path, SMOKE_UPDATES + 1, within=900)
    for channel in WANTED:
        assert [(update["update"], update["version"]) for update in of(channel, resumed)] == [(3, 4)]
    steps = stage.pool.stats().channels
    assert all(steps[channel].shipped.steps >= 3 * GROUPS * GROUP for channel in WANTED)


@pytest.mark.nightly
async def test_two_tenants_learn_opposite_tasks_on_one_vllm(stage: Stage, tmp_path: Path) -> None:
    base = {channel: await held_out_reward(stage.engine.url, stage.engine.model_name, channel) for channel in WANTED}
    answer = await stage.train_with_agents(tmp_path, NIGHTLY_UPDATES, within=3600)
    adapters = {channel: answer["policies"][channel]["adapter"] for channel in WANTED}
    learned = {
        (trained, judged): await held_out_reward(stage.engine.url, adapters[trained], judged)
        for trained in WANTED
        for judged in WANTED
    }
    for channel, other in (("east", "west"), ("west", "east")):
        assert learned[channel, channel] >= base[channel] + ENOUGH, (base, learned)
        assert learned[channel, other] < base[other], "the other tenant's task was learned too"
        rewards = [update["reward"] for update in of(channel, answer)]
        assert fmean(rewards[-5:]) >= fmean(rewards[:3]) + ENOUGH, rewards
        assert max(update["logprob_gap"] or 0.0 for update in of(channel, answer)) <= ALIKE
