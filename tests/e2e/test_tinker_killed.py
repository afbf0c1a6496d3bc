"""examples/tinker on SkyRL's real server, killed with SIGKILL at random moments: every group is trained exactly once.

An update is one group here. So if the saved state has as many updates as groups are acknowledged, none of them was
trained twice; and if all others are still in the pool, none was lost. What a killed run leaves in SkyRL's memory is
not seen by this: docs/bring-your-own-trainer.md says what that can be.
"""

import asyncio
import random
import secrets
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.ray_cluster import RayCluster
from rig.trainers.groups_ahead import NEVER, GroupsAhead
from rig.trainers.process import DEFAULT, lives_on
from rig.trainers.skyrl_server import start_skyrl
from rig.trainers.tinker_run import TinkerRun, start_tinker
from rig.two_tenants import new_model
from rig.waiting import until
from stepwell.demo.model import write_model
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.trainers.feed import read_state
from stepwell.trainers.tinker.tinker_loop import FILE, TinkerRecord
from tests.e2e.test_tinker_service import CHANNEL, ROLLOUTS, SETTINGS, WITHIN, add_group
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine

KILLS, AHEAD = 50, 50
"""AHEAD: groups, when a run begins."""
LONGEST = 4.0
"""Seconds: how long a run lives at most after what it was let do."""


async def kill_somewhere(run: TinkerRun, chance: random.Random) -> None:
    """While it starts, during its first update, or later."""
    awaited = chance.choice((lambda: True, lambda: run.published(CHANNEL), lambda: run.updates(CHANNEL)))
    try:
        await until(lambda: run.is_over() or bool(awaited()), "the run to come so far", WITHIN)
        await asyncio.to_thread(lives_on, run.process, chance.uniform(0.0, LONGEST))
    finally:
        run.kill()
    assert run.process.returncode < 0, run.log.read_text()[-8000:]


@pytest.mark.nightly
async def test_a_run_killed_at_random_moments_trains_every_group_exactly_once(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    chance = random.Random(seed := secrets.randbits(32))
    model = write_model(new_model(layers=1), tmp_path / "model")
    with (
        ray_cluster.namespace(DEFAULT) as namespace,
        serve(AdapterEngine()) as engine,
        start_skyrl(model, tmp_path / "skyrl", adapters=KILLS + 4, rank=4, rows=ROLLOUTS) as service,
    ):
        start_pool(PoolPlan(), namespace)
        client = PoolClient("data_pool", namespace)
        await client.change_engines(add=(engine.url,))
        groups = GroupsAhead(client, CHANNEL, add_group, ROLLOUTS)

        def train(name: str, updates: int) -> TinkerRun:
            run = {"service": service.url, "model": str(model), "folder": str(tmp_path), "channels": [CHANNEL]}
            return start_tinker({**run, "updates": updates}, SETTINGS, address=ray_cluster.address, log=tmp_path / name)

        for number in range(KILLS):
            await groups.top_up(AHEAD)
            await kill_somewhere(train(f"killed-{number}.log", NEVER), chance)
        record = read_state(TinkerRecord, tmp_path / CHANNEL / FILE)
        updates = (record.update if record else 0) + 5
        await asyncio.to_thread(train("last.log", updates).wait, WITHIN)
        record = read_state(TinkerRecord, tmp_path / CHANNEL / FILE)
        pool = DataPool(client)
        await until(lambda: not pool.stats().leases, "the leases of killed runs to return")
        acknowledged = groups.added - await groups.held()

    assert record is not None
    assert (record.update, acknowledged) == (updates, updates), f"seed {seed}"
    assert updates > KILLS // 4, f"seed {seed}: most runs were killed before their first update"
