"""A trainer that is killed with SIGKILL anywhere in an update and started again: nothing is lost or trained twice."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient
from stepwell.pool.shard.actor import start_pool
from stepwell.trainers.checkpoint import read_checkpoint
from tests.builders import make_step
from tests.integration.trainers.dying_trainer import GROUPS, UPDATES
from tests.rig.ray_cluster import RayCluster

CHECKOUT = Path(__file__).parents[3]
ROLLOUTS = 2
PLACES = ("forward", "save", "write", "ack")


async def fill(client: PoolClient) -> None:
    for group in range(GROUPS):
        for rollout in range(ROLLOUTS):
            uid, prompt = f"{group}-{rollout}", f"p{group}"
            await client.register_trajectory(Registration(uid, prompt, group_size=ROLLOUTS))
            step = make_step(uid, prompt, uid=uid, prompt_ids=[group, rollout], response_ids=[3, 4], temperature=1.0)
            assert await client.submit_steps([step]) == [SubmitVerdict.ACCEPTED]
            assert await client.complete_trajectory(uid, prompt, float(rollout)) is EndResult.COMPLETED


async def talk(client: PoolClient) -> None:
    """Sessions that do not end, with a reward for each step."""
    for session in range(GROUPS):
        uid = f"s{session}"
        await client.register_trajectory(Registration(uid, uid))
        for turn in range(ROLLOUTS):
            step = make_step(
                uid,
                uid,
                uid=f"{uid}-{turn}",
                prompt_ids=[session, turn],
                response_ids=[3, 4],
                temperature=1.0,
                step_index=turn,
                reward=float(turn),
            )
            assert await client.submit_steps([step]) == [SubmitVerdict.ACCEPTED]


@pytest.mark.parametrize(
    ("unit", "waits"),
    [("groups", False), ("groups", True), ("steps", False), pytest.param("steps", True, marks=pytest.mark.nightly)],
    ids=lambda value: {False: "restarted at once", True: "restarted after its leases ran out"}.get(value, value),
)
def test_a_trainer_killed_anywhere_loses_nothing_and_trains_nothing_twice(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path, unit: str, waits: bool
) -> None:
    start_pool(PoolPlan(), namespace)
    client = PoolClient("data_pool", namespace)
    asyncio.run(talk(client) if unit == "steps" else fill(client))
    pool = DataPool(client)

    def run(place: str) -> int:
        program = [sys.executable, "-m", "tests.integration.trainers.dying_trainer"]
        command = [*program, ray_cluster.address, namespace, str(tmp_path), place, unit]
        with (tmp_path / f"{place}.log").open("wb") as output:
            return subprocess.run(command, cwd=CHECKOUT, env=os.environ, stdout=output, stderr=output).returncode

    for place in ("ack", "forward") if waits else PLACES:
        code = run(place)
        assert code == -signal.SIGKILL, (tmp_path / f"{place}.log").read_text()
        deadline = time.monotonic() + 30
        while waits and pool.stats().leases:
            assert time.monotonic() < deadline, "waited 30 s for the leases to run out"
            time.sleep(0.1)
    assert run("nowhere") == 0, (tmp_path / "nowhere.log").read_text()
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    assert saved.update == UPDATES
    assert saved.model["counts"].tolist() == [ROLLOUTS] * GROUPS
    train = pool.stats().channels["train"]
    assert (train.held.steps, train.shipped.steps, dict(train.dropped)) == (0, GROUPS * ROLLOUTS, {})
