"""`stepwell forget` on a real pool of Ray actors that are killed meanwhile."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rig import forgetting as rig
from rig.actors import pid_of
from rig.forgetting import ALICE, BOB, PLACES
from rig.ray_cluster import RayCluster
from stepwell.errors import Forgotten
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.sessions import SessionCall, session_prompt_uid
from stepwell.pool.client import DataPool, PoolClient
from tests.integration.pool.conftest import started


async def hold_sessions(client: PoolClient) -> None:
    for place in PLACES:
        for user in (ALICE, BOB):
            session = rig.session_of(user, place)
            await client.place_session(SessionCall(session, "new", user))
            await client.submit_steps([rig.step_of(user, place)])
            await client.complete_trajectory(session, session_prompt_uid(session), 1.0)


def test_a_person_is_forgotten_by_one_command_though_the_shards_are_killed(
    ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    state, archive, receipt = tmp_path / "state", tmp_path / "archive", tmp_path / "receipt.json"
    plan = PoolPlan(shards=2, journal=str(state), archive=str(archive), limits=Limits(), min_free_bytes=0)
    client = started(plan, namespace)
    asyncio.run(hold_sessions(client))
    pool = DataPool(PoolClient(plan.name, namespace))
    pool.fetch_batch(4)
    assert rig.traces(ALICE, state)
    line = [sys.executable, "-m", "stepwell", "forget", "--receipt", str(receipt)]
    line += ["--ray-address", ray_cluster.address, "--ray-namespace", namespace]
    forgetting = subprocess.Popen(line, env={**os.environ, "STEPWELL_FORGET_SUBJECT": ALICE}, stderr=subprocess.PIPE)
    for shard in plan.shard_names():
        os.kill(pid_of(shard, namespace), signal.SIGKILL)
    _, said = forgetting.communicate(timeout=300)
    assert forgetting.returncode == 0, said.decode()
    assert rig.traces(ALICE, state, archive) == set()
    assert rig.traces(BOB, state)
    written = json.loads(receipt.read_text())
    removed = [found for shard in written["shards"].values() for found in shard["trajectories"].values()]
    assert len(removed) == len(PLACES)
    assert ALICE not in receipt.read_text()
    assert {step.trajectory_uid for step in pool.fetch_batch(5).steps()} <= {rig.session_of(BOB, p) for p in PLACES}
    with pytest.raises(Forgotten):
        asyncio.run(PoolClient(plan.name, namespace).place_session(SessionCall("anew", "new", ALICE)))
