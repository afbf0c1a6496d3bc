"""The real command, over a real pool on Ray."""

import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from stepwell.pool.actors import start_pool

from rig.builders import make_group
from rig.gateways import served_process
from rig.ray_cluster import RayCluster
from rig.vocabulary import encode
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient
from tests.integration.dashboard.client import BEARER, KEY, curate, eventually, get, known


@pytest.fixture
def url(ray_cluster: RayCluster, namespace: str, tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    """Of a dashboard beside a pool of two shards."""
    start_pool(PoolPlan(shards=2), namespace)
    flags = {"ray_address": ray_cluster.address, "ray_namespace": namespace, "tokenizer_path": tiny_model}
    keys = {"STEPWELL_DASHBOARD_CONTROL_KEYS": KEY}
    log = tmp_path / "dashboard.log"
    with served_process("stepwell", "dashboard", flags=flags, log=log, env=keys, within=60) as dashboard:
        yield dashboard.url


async def test_a_real_pool_is_shown_and_obeys(url: str, namespace: str) -> None:
    client, keyed = PoolClient("data_pool", namespace), httpx.AsyncClient(base_url=url, headers=BEARER, timeout=120)
    for number in range(6):
        said = f"<|im_start|>user\nThis is number {number}<|im_end|>\n<|im_start|>assistant\n"
        steps, registrations = make_group(
            f"p{number}", 2, "sums", prompt_ids=encode(said), response_ids=encode("Hi!<|im_end|>")
        )
        await client.submit_groups(steps, registrations)
    async with keyed as page:
        await known(page, trajectories=12, texts=12)
        found = await get(page, "trajectories", text="number 3", source="sums", state="ready")
        assert sorted(row["trajectory_uid"] for row in found["rows"]) == ["p3-0", "p3-1"]
        view = await get(page, "trajectory", trajectory_uid="p3-0", prompt_uid="p3")
        assert [turn["text"] for turn in view["steps"][0]["turns"]] == ["This is number 3", "Hi!"]
        status = await get(page, "status")
        assert (status["pool"]["shards"], status["pool"]["submitted"], status["pool_error"]) == (2, 12, None)
        group = found["rows"][0]
        beside = await get(page, "group", prompt_uid="p3", group=group["group"], shard=group["shard"])
        assert [row["last"] for row in beside["rows"]] == ["Hi!<|im_end|>"] * 2
        assert "train" in (await get(page, "series"))["channels"]

        assert await curate(page, "reject", ("p3-0", "p3"), why="it cheats") == {"p3-0": "done"}
        assert await curate(page, "relabel", ("p3-1", "p3"), reward=-1) == {"p3-1": "done"}
        batch = await client.fetch_batch(6, lease=60)
        shipped = {step.trajectory_uid: step.reward for g in batch.groups() for t in g for step in t}
        assert "p3-0" not in shipped
        assert shipped["p3-1"] == -1.0
        await client.ack(batch)

        async def is_trained() -> bool:
            return bool((await get(page, "trajectories", state="trained"))["matched"] == 11)

        await eventually(is_trained, "what was trained to be seen")
        entries = (await get(page, "audit"))["entries"]
        admin = f"control-{sha256(KEY.encode()).hexdigest()[:8]}"
        assert {(entry["by"], entry["action"]) for entry in entries} == {(admin, "reject"), (admin, "relabel")}


def test_a_pool_that_is_not_there_is_said_in_one_line(ray_cluster: RayCluster, namespace: str) -> None:
    command = [sys.executable, "-m", "stepwell", "dashboard", "--ray-address", ray_cluster.address]
    ended = subprocess.run([*command, "--ray-namespace", namespace], capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1
    assert "no DataPool named 'data_pool'" in ended.stderr
