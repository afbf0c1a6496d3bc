"""What a killed gateway had answered for: kept in its spool, or confirmed by the pool before the answer."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from stepwell.pool.actors import start_pool

from rig.actors import pid_of
from rig.fake_engine import FakeEngine
from rig.gateways import GatewayProcess, free_port
from rig.waiting import wait_until
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from tests.integration.gateway.conftest import StartGateway


@pytest.fixture
def data_pool(namespace: str, tmp_path: Path) -> DataPool:
    """With a journal, so that it comes back with its trajectories when it is killed."""
    start_pool(PoolPlan(journal=str(tmp_path / "journal")), namespace)
    return DataPool(PoolClient("data_pool", namespace))


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "gateway.spool"


@contextmanager
def stopped(namespace: str) -> Iterator[int]:
    """The pool does not answer meanwhile; gives its process id."""
    pid = pid_of("data_pool", namespace)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def opened(gateway: GatewayProcess) -> str:
    """The base_url of a new trajectory."""
    base_url: str = httpx.post(f"{gateway.url}/init_trajectory", json={}).json()["base_url"]
    return base_url


def say(base_url: str, text: str) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=120)


def steps_in(pool: DataPool) -> int:
    channels = pool.stats().channels
    return channels["train"].accepted.steps if channels else 0


def spooled(spool: Path) -> int:
    """How many steps a gateway would find there that was started now. Looks at a copy: the file has its owner."""
    copy = spool.with_name("copy.spool")
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{spool}{suffix}", f"{copy}{suffix}")
    with closing(Spool(copy)) as found:
        return len(found.take_leftovers())


def test_steps_answered_while_the_pool_was_away_survive_the_kill_of_their_gateway(
    start_gateway: StartGateway, data_pool: DataPool, namespace: str, spool: Path
) -> None:
    port = free_port()
    with start_gateway(port=port, spool=spool) as gateway:
        base_url = opened(gateway)
        with stopped(namespace) as pid:
            for turn in range(3):
                assert say(base_url, "x" * turn).status_code == 200
            wait_until(lambda: spooled(spool) == 3, "three steps in the spool")
            gateway.kill()
            os.kill(pid, signal.SIGKILL)  # and with it what the gateway had already sent
    with start_gateway(port=port, spool=spool):
        wait_until(lambda: steps_in(data_pool) == 3, "the steps of the killed gateway in the pool")
        assert httpx.post(f"{base_url}/v1/complete_trajectory", json={}).json() == {"status": "completed"}
        wait_until(lambda: spooled(spool) == 0, "the spool to be empty")
    ((trajectory,),) = data_pool.fetch_batch(1, timeout=60).groups()
    assert [step.step_index for step in trajectory] == [0, 1, 2]
    lengths = [len(step.prompt_ids) for step in trajectory]
    assert lengths == sorted(lengths), "the steps are not in the order of the calls"


def test_a_trajectory_is_completed_only_after_what_an_earlier_gateway_left_of_it(
    start_gateway: StartGateway, data_pool: DataPool, namespace: str, spool: Path
) -> None:
    port = free_port()
    with start_gateway(port=port, spool=spool) as gateway:
        base_url = opened(gateway)
        with stopped(namespace) as pid:
            assert say(base_url, "last words").status_code == 200
            wait_until(lambda: spooled(spool) == 1, "the step in the spool")
            gateway.kill()
            os.kill(pid, signal.SIGKILL)
    with start_gateway(port=port, spool=spool):
        answer = httpx.post(f"{base_url}/v1/complete_trajectory", json={}, timeout=120)
        assert answer.json() == {"status": "completed"}
    ((trajectory,),) = data_pool.fetch_batch(1, timeout=60).groups()
    assert len(trajectory) == 1


def test_a_second_gateway_is_refused_the_spool_of_the_first(
    start_gateway: StartGateway, data_pool: DataPool, spool: Path
) -> None:
    with (
        start_gateway(spool=spool),
        pytest.raises(AssertionError, match=f"python -m stepwell.gateway: spool {spool} is in use by another gateway"),
        start_gateway(spool=spool),
    ):
        pass


def test_with_durability_sync_an_answer_waits_for_the_pool_and_survives_the_kill_of_its_gateway(
    start_gateway: StartGateway, data_pool: DataPool, namespace: str, engine_thread: FakeEngine
) -> None:
    with start_gateway(durability="sync") as gateway, ThreadPoolExecutor(1) as agent:
        base_url = opened(gateway)
        with stopped(namespace):
            answering = agent.submit(say, base_url, "is it kept?")
            wait_until(lambda: engine_thread.asked["/v1/chat/completions"] == 1, "the engine to be asked")
            wait_until(lambda: engine_thread.in_flight == 0, "the engine to have answered")
            with pytest.raises(TimeoutError):
                answering.result(0.5)
        assert answering.result(60).status_code == 200
        gateway.kill()
    assert steps_in(data_pool) == 1
