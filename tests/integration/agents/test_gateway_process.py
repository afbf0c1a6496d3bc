"""A gateway as a child, with real Ray: started, kept up, ended, and never an orphan."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.fake_engine import FakeEngine
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from rig.waiting import answers, wait_until
from stepwell.agents.blackbox import BlackBoxAgentFlow
from stepwell.agents.dataset import Dataset
from stepwell.agents.gateway_process import GatewayProcess
from stepwell.agents.rollout import Rollout
from stepwell.agents.rollouter import AsyncRollouter
from stepwell.errors import NotReady
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient

KEY = "a-control-key-of-the-tests"

ORPHANING = """
import asyncio, sys
from stepwell.agents.gateway_process import GatewayProcess

async def main():
    flags = dict(flag.split("=", 1) for flag in sys.argv[2:])
    async with GatewayProcess(**flags) as gateway:
        with open(sys.argv[1] + ".new", "w") as told:
            told.write(f"{gateway.pid} {gateway.url}")
        import os
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def flags(ray_cluster: RayCluster, namespace: str, tiny_model: Path) -> Iterator[dict[str, object]]:
    with in_thread(FakeEngine()) as engine:
        yield {
            "data_pool_name": "data_pool",
            "vllm_addresses": engine.url,
            "tokenizer_path": tiny_model,
            "prompt_length": 2048,
            "response_length": 64,
            "ray_address": ray_cluster.address,
            "ray_namespace": namespace,
        }


@pytest.fixture
def data_pool(namespace: str) -> DataPool:
    start_pool(PoolPlan(), namespace)
    return DataPool(PoolClient("data_pool", namespace))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def ask(rollout: Rollout) -> float:
    await rollout.chat([{"role": "user", "content": "hello"}], max_tokens=4)
    return 1.0


async def test_it_is_ready_inside_the_block_and_gone_after_it(
    flags: dict[str, object], data_pool: DataPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        GatewayProcess(key=KEY, **flags) as gateway,  # type: ignore[arg-type]
        BlackBoxAgentFlow(gateway.url, ask, key=KEY, group_size=1) as flow,
    ):
        assert gateway.pid is not None
        command = command_line(gateway.pid)
        assert "stepwell.gateway" in command
        assert KEY not in command
        assert (await flow.rollout({}, "p")).is_completed
    assert not is_alive(gateway.pid)
    assert not answers(f"{gateway.url}/health")
    assert len(data_pool.fetch_batch(1, timeout=60)) == 1, "it delivered what it had"
    said = [record for record in caplog.records if record.getMessage() == f"gateway: gateway on {gateway.url}"]
    assert [record.levelno for record in said] == [logging.INFO]


async def test_a_gateway_that_cannot_start_says_what_it_said(flags: dict[str, object]) -> None:
    with pytest.raises(NotReady, match=r"(?s)ended with exit code 2:.*--prompt-length"):
        async with GatewayProcess(**flags | {"prompt_length": 0}):  # type: ignore[arg-type]
            pass


async def test_a_gateway_that_does_not_become_ready_in_time_is_ended(flags: dict[str, object]) -> None:
    gateway = GatewayProcess(ready_timeout=1.0, **flags)  # type: ignore[arg-type]
    with pytest.raises(NotReady, match="not ready after 1 s: "):
        await gateway.__aenter__()
    assert gateway.pid is not None
    assert not is_alive(gateway.pid)


async def test_a_killed_gateway_is_started_again_and_rollouts_go_on(
    flags: dict[str, object], data_pool: DataPool
) -> None:
    begun = 0

    async def agent(rollout: Rollout) -> float:
        nonlocal begun
        begun += 1
        is_killer = begun == 10
        await ask(rollout)
        if is_killer:
            assert gateway.pid is not None
            os.kill(gateway.pid, signal.SIGKILL)
        return await ask(rollout)

    gateway = GatewayProcess(**flags)  # type: ignore[arg-type]
    flow = BlackBoxAgentFlow(gateway.url, agent, group_size=4)
    dataset = Dataset([{"n": n} for n in range(5)])
    tally = await AsyncRollouter(flow, dataset, gateway=gateway, concurrency=8).run(groups=40)
    assert (tally.groups, tally.given_up, gateway.restarts) == (40, 0, 1)
    assert tally.rollouts["aborted"] > 0, "it was killed under an agent's feet"
    groups = data_pool.fetch_batch(40, timeout=60).groups()
    assert [[len(trajectory) for trajectory in group] for group in groups] == [[2] * 4] * 40, "a step is lost"
    assert data_pool.stats().channels["train"].groups == 0, "no group is left that will never be whole"


def test_a_gateway_does_not_outlive_a_parent_that_is_killed(
    flags: dict[str, object], data_pool: DataPool, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    arguments = [f"{name}={value}" for name, value in flags.items()]
    parent = subprocess.Popen([sys.executable, "-c", ORPHANING, str(told), *arguments], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: told.exists() or parent.poll() is not None, "the gateway to be ready")
        pid, url = told.read_text().split()
        assert answers(f"{url}/health")
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_alive(int(pid)), "the gateway to end")
