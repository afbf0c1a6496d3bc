"""A trainer that is killed with SIGKILL anywhere in an update and started again: nothing is lost or trained twice."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.builders import make_step
from rig.ray_cluster import RayCluster
from rig.trainers.lives import passes_for
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.client import DataPool, PoolClient
from stepwell.trainers.trainer import read_checkpoint
from tests.integration.trainers.dying_trainer import GROUPS_PER_UPDATE

CHECKOUT = Path(__file__).parents[3]
ROLLOUTS = 2
UPDATES = 8
PLACES = ("forward", "save", "write", "ack")
Live = Callable[[str], int]
"""How the next life is to end, and its exit code."""


async def fill(client: PoolClient, groups: int) -> None:
    for group in range(groups):
        for rollout in range(ROLLOUTS):
            uid, prompt = f"{group}-{rollout}", f"p{group}"
            await client.register_trajectory(Registration(uid, prompt, group_size=ROLLOUTS))
            step = make_step(uid, prompt, uid=uid, prompt_ids=[group, rollout], response_ids=[3, 4], temperature=1.0)
            assert await client.submit_steps([step]) == [SubmitVerdict.ACCEPTED]
            assert await client.complete_trajectory(uid, prompt, float(rollout)) is EndResult.COMPLETED


async def talk(client: PoolClient, sessions: int) -> None:
    """Sessions that do not end, with a reward for each step."""
    for session in range(sessions):
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


@contextmanager
def dying_trainer(ray_cluster: RayCluster, namespace: str, folder: Path, unit: str, updates: int) -> Iterator[Live]:
    program = [sys.executable, "-m", "tests.integration.trainers.dying_trainer"]
    command = [*program, ray_cluster.address, namespace, str(folder), unit, str(updates)]
    with (
        (folder / "trainer.log").open("wb") as errors,
        subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def live(how: str) -> int:
            orders.write(f"{how}\n")
            orders.flush()
            answer = answers.readline()
            assert answer, (folder / "trainer.log").read_text()
            return int(answer)

        yield live


def check_all_trained_once(pool: DataPool, folder: Path, updates: int) -> None:
    groups = GROUPS_PER_UPDATE * updates
    saved = read_checkpoint(folder)
    assert saved is not None
    assert saved.update == updates
    assert saved.model["counts"].tolist() == [ROLLOUTS] * groups
    train = pool.stats().channels["train"]
    assert (train.held.steps, train.shipped.steps, dict(train.dropped)) == (0, groups * ROLLOUTS, {})


@pytest.mark.parametrize(
    ("unit", "waits"),
    [
        ("groups", False),
        ("steps", False),
        pytest.param("groups", True, marks=pytest.mark.nightly),
        pytest.param("steps", True, marks=pytest.mark.nightly),
    ],
    ids=lambda value: {False: "restarted at once", True: "restarted after its leases ran out"}.get(value, value),
)
def test_a_trainer_killed_anywhere_loses_nothing_and_trains_nothing_twice(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path, unit: str, waits: bool
) -> None:
    start_pool(PoolPlan(), namespace)
    client = PoolClient("data_pool", namespace)
    asyncio.run((talk if unit == "steps" else fill)(client, GROUPS_PER_UPDATE * UPDATES))
    pool = DataPool(client)
    with dying_trainer(ray_cluster, namespace, tmp_path, unit, UPDATES) as live:
        for place in ("ack", "forward") if waits else PLACES:
            assert live(place) == -signal.SIGKILL, (tmp_path / "trainer.log").read_text()
            deadline = time.monotonic() + 30
            while waits and pool.stats().leases:
                assert time.monotonic() < deadline, "waited 30 s for the leases to run out"
                time.sleep(0.1)
        assert live("nowhere") == 0, (tmp_path / "trainer.log").read_text()
    check_all_trained_once(pool, tmp_path, UPDATES)


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_trainer_killed_at_random_moments_loses_nothing_and_trains_nothing_twice(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path, kills: int
) -> None:
    updates, seed = passes_for(kills), secrets.randbits(32)
    start_pool(PoolPlan(), namespace)
    client = PoolClient("data_pool", namespace)
    asyncio.run(fill(client, GROUPS_PER_UPDATE * updates))
    with dying_trainer(ray_cluster, namespace, tmp_path, "groups", updates) as live:
        assert live(f"random {seed} {kills}") == -signal.SIGKILL
        assert live("nowhere") == 0, f"seed {seed}: {(tmp_path / 'trainer.log').read_text()}"
    check_all_trained_once(DataPool(client), tmp_path, updates)
