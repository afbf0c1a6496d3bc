"""The loop on SkyRL's real server, with an engine that only takes adapters: what is left after a kill.

With vLLM, agents and more updates: test_tinker.py, by `just nightly`.
"""

import subprocess
from pathlib import Path

from stepwell.demo.model import write_model
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.actor import start_pool
from stepwell.trainers.tinker.tinker_record import TinkerRecord, read_record
from tests.e2e.two_tenants import new_model
from tests.rig.ray_cluster import RayCluster
from tests.rig.trainers.process import answer_of, start_program
from tests.rig.trainers.skyrl_server import start_skyrl
from tests.rig.waiting import until
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine

POOL = "tinker_service"
CHANNELS = ("east", "west")
GROUPS, ROLLOUTS = 3, 2
"""A group is an update."""
WITHIN = 300.0
SETTINGS = {
    "groups": 1,
    "rank": 4,
    "loss": "ppo",
    "service_loss": "mean",
    "rows_multiple": ROLLOUTS,
    "lease": 15.0,
    "fetch_timeout": 60.0,
}


async def fill(client: PoolClient) -> None:
    for channel in CHANNELS:
        for group in range(GROUPS):
            prompt = f"{channel}{group}"
            for rollout in range(ROLLOUTS):
                uid = f"{prompt}-{rollout}"
                await client.register_trajectory(Registration(uid, prompt, channel, group_size=ROLLOUTS))
                await client.submit_steps([one_turn(uid, prompt, [ord(channel[0]), group], [97 + rollout])])
                await client.complete_trajectory(uid, prompt, float(rollout))


def record_of(folder: Path, channel: str) -> TinkerRecord:
    record = read_record(folder / channel)
    assert record is not None
    return record


async def test_a_killed_run_continues_with_its_weights_and_trains_every_group_once(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    start_pool(PoolPlan(name=POOL), namespace)
    client = PoolClient(POOL, namespace)
    model = write_model(new_model(layers=1), tmp_path / "model")
    with serve(AdapterEngine()) as engine, start_skyrl(model, tmp_path / "skyrl", rank=4, rows=ROLLOUTS) as service:
        await client.change_engines(add=(engine.url,))
        await fill(client)

        def train(name: str) -> "tuple[subprocess.Popen[str], Path]":
            asked = {
                "pool": POOL,
                "address": ray_cluster.address,
                "namespace": namespace,
                "service": service.url,
                "model": str(model),
                "folder": str(tmp_path),
                "channels": CHANNELS,
                "updates": GROUPS,
                "settings": SETTINGS,
            }
            log = tmp_path / f"{name}.log"
            return start_program("skyrl", "with_tinker.py", asked, log=log), log

        killed, log = train("killed")
        try:
            updated = [f'update {{"channel": "{channel}"' for channel in CHANNELS]
            await until(
                lambda: killed.poll() is not None or all(line in log.read_text() for line in updated),
                "an update of both channels",
                WITHIN,
            )
        finally:
            killed.kill()
            killed.wait()
        assert killed.returncode < 0, log.read_text()[-8000:]
        left = {channel: record_of(tmp_path, channel).update for channel in CHANNELS}
        resumed = answer_of(*train("resumed"), timeout=WITHIN)
        finished = answer_of(*train("finished"), timeout=WITHIN)
        stats, loaded = DataPool(client).stats(), engine.loaded
    for channel in CHANNELS:
        numbers = [update["update"] for update in resumed["updates"] if update["channel"] == channel]
        assert numbers == list(range(left[channel] + 1, GROUPS + 1))
        held, shipped = stats.channels[channel].held.steps, stats.channels[channel].shipped.steps
        assert (held, shipped) == (0, GROUPS * ROLLOUTS)
        assert finished["published"][channel] == resumed["published"][channel][-1:], "the weights changed on a resume"
        assert set(resumed["published"][channel]) <= set(loaded)
