"""The loop of docs/bring-your-own-trainer.md, as it stands there. Names, addresses and the number of updates are the
test's own."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.calls import get
from rig.ray_cluster import RayCluster
from rig.vllm_server import VllmServer
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import DataPool, PoolClient
from tests.unit.trainers.models import one_turn

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own-trainer.md"
POOL = "own_trainer"
UPDATES, GROUPS = 3, 16


def loop() -> str:
    return str(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])


async def fill(pool: PoolClient) -> None:
    for number in range(UPDATES * GROUPS):
        prompt = f"p{number}"
        for n in range(2):
            uid = f"{prompt}-{n}"
            await pool.register_trajectory(Registration(uid, prompt, group_size=2))
            await pool.submit_steps([one_turn(uid, prompt, [1, 2, number], [3, 4 + n])])
            await pool.complete_trajectory(uid, prompt, float(n))


@pytest.mark.usefixtures("weights")
async def test_the_loop_trains_and_the_engine_has_its_weights(
    vllm: VllmServer, tiny_model: Path, ray_cluster: RayCluster, namespace: str, tmp_path: Path
) -> None:
    start_pool(PoolPlan(name=POOL), namespace)
    await fill(PoolClient(POOL, namespace))
    ours = {
        'Path("model")': f"Path({str(tiny_model)!r})",
        "http://127.0.0.1:8001": vllm.url,
        ", 100\n": f", {UPDATES}\n",
        'connect("data_pool")': f"connect({POOL!r}, address={ray_cluster.address!r}, namespace={namespace!r})",
    }
    program = loop()
    for theirs, own in ours.items():
        assert theirs in program
        program = program.replace(theirs, own)

    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    printed = re.findall(r"version (\d+): reward 0\.50, loss", done.stdout)
    assert printed == ["2", "3", "4"]
    pool = DataPool(PoolClient(POOL, namespace))
    assert pool.stats().policy_version == 4
    assert pool.stats().channels["train"].shipped.steps == UPDATES * GROUPS * 2
    assert (await get(f"{vllm.url}/weight_info")).json()["weight_version"] == "4"


def test_the_loop_is_short() -> None:
    lines = [line for line in loop().splitlines() if line.strip()]
    assert len(lines) < 40
