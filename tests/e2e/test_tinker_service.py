"""examples/tinker on SkyRL's real server, with an engine that only takes adapters. It is killed, and another continues,
with a group that tells neither log-probabilities nor a temperature.

With vLLM, agents, two tenants and more updates: test_tinker.py, by `just nightly`.
"""

import asyncio
from pathlib import Path
from typing import Any

from stepwell.pool.actors import start_pool

from rig.ray_cluster import RayCluster
from rig.trainers.process import DEFAULT
from rig.trainers.skyrl_server import start_skyrl
from rig.trainers.tinker_run import TinkerRun, start_tinker
from rig.two_tenants import new_model
from rig.waiting import until
from stepwell.demo.model import write_model
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient
from stepwell.trainers.feed import read_state
from stepwell.trainers.tinker.tinker_loop import FILE, TinkerRecord
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine

CHANNEL = "east"
ROLLOUTS = 2
"""Of a group, which is an update."""
WITHIN = 300.0
SETTINGS = {"groups": 1, "rank": 4, "loss": "ppo", "service_loss": "mean", "rows_multiple": ROLLOUTS}


async def add_group(client: PoolClient, number: int, **step: Any) -> None:
    for rollout in range(ROLLOUTS):
        prompt, uid = f"p{number}", f"p{number}-{rollout}"
        await client.register_trajectory(Registration(uid, prompt, CHANNEL, group_size=ROLLOUTS))
        await client.submit_steps([one_turn(uid, prompt, [101, number % 100], [97 + rollout], **step)])
        await client.complete_trajectory(uid, prompt, float(rollout))


async def test_a_killed_run_continues_with_the_same_weights(ray_cluster: RayCluster, tmp_path: Path) -> None:
    model = write_model(new_model(layers=1), tmp_path / "model")
    with (
        ray_cluster.namespace(DEFAULT) as namespace,
        serve(AdapterEngine()) as engine,
        start_skyrl(model, tmp_path / "skyrl", rank=4, rows=ROLLOUTS) as service,
    ):
        start_pool(PoolPlan(), namespace)
        client = PoolClient("data_pool", namespace)
        await client.change_engines(add=(engine.url,))
        run = {
            "service": service.url,
            "model": str(model),
            "folder": str(tmp_path),
            "channels": [CHANNEL],
            "updates": 2,
        }

        def train(name: str) -> TinkerRun:
            return start_tinker(run, SETTINGS, address=ray_cluster.address, log=tmp_path / name)

        await add_group(client, 1)
        killed = train("killed.log")
        try:
            await until(lambda: killed.is_over() or len(engine.loaded) == 2, "an update", WITHIN)
        finally:
            killed.kill()
        assert killed.process.returncode < 0, killed.log.read_text()[-8000:]
        record = read_state(TinkerRecord, tmp_path / CHANNEL / FILE)
        assert record is not None
        assert (record.update, record.version) == (1, 2)

        await add_group(client, 2, response_logprobs=None, temperature=None)
        resumed = train("resumed.log")
        await asyncio.to_thread(resumed.wait, WITHIN)
        held = DataPool(client).stats().channels[CHANNEL].held.steps
    assert [(update["update"], update["version"]) for update in resumed.updates(CHANNEL)] == [(2, 3)]
    assert resumed.updates(CHANNEL)[0]["filled_in"]["logprobs_current"] == ROLLOUTS, "the service computes missing ones"
    untrained, trained = engine.loaded[:2]
    assert resumed.published(CHANNEL) == [trained, engine.loaded[-1]], "the weights are not those of before the kill"
    assert len({name.rpartition("-")[2] for name in (untrained, trained, engine.loaded[-1])}) == 3
    assert held == 0
