"""D21: a rollout that may lack a call of a gateway that died is not trained as if it were whole."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rig.actors import pid_of
from rig.fake_engine import FakeEngine, Faults
from rig.gateways import GatewayProcess, gateway_process
from rig.ray_cluster import RayCluster
from rig.texts import text_of, texts_of
from rig.threads import in_thread
from rig.waiting import wait_until
from stepwell.errors import FetchTimeout
from stepwell.pool.actors import start_pool
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from stepwell.steps.trainable import INCOMPLETE
from tests.integration.gateway.test_spool import spooled

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
StartNamed = Callable[..., AbstractContextManager[GatewayProcess]]


@pytest.fixture
def unique_engine() -> Iterator[FakeEngine]:
    """No two answers are the same."""
    with in_thread(FakeEngine()) as engine:
        engine.faults = Faults(ignore_seed=True, token_delay_s=0.05)
        yield engine


@pytest.fixture
def start_named(ray_cluster: RayCluster, namespace: str, unique_engine: FakeEngine, tmp_path: Path) -> StartNamed:
    def start(name: str, **flags: object) -> AbstractContextManager[GatewayProcess]:
        given = {
            "data_pool_name": "data_pool",
            "vllm_addresses": unique_engine.url,
            "tokenizer_path": "no/such/folder",
            "ray_address": ray_cluster.address,
            "ray_namespace": namespace,
            **flags,
        }
        return gateway_process(tmp_path / f"{name}.log", **given)  # type: ignore[arg-type]

    return start


@dataclass(slots=True)
class Rollout:
    path: str
    read: list[str]

    def ask(self, gateway: GatewayProcess) -> None:
        answer = httpx.post(f"{gateway.url}{self.path}/v1/chat/completions", json=BODY, timeout=120)
        assert answer.status_code == 200, answer.text
        text = text_of(answer.content)
        assert text is not None
        self.read.append(text)

    def complete(self, gateway: GatewayProcess) -> None:
        """As often as it takes."""

        def is_completed() -> bool:
            answer = httpx.post(f"{gateway.url}{self.path}/v1/complete_trajectory", json={"reward": 1.0}, timeout=120)
            return answer.status_code == 200

        wait_until(is_completed, "the rollout to be completed")


def opened(gateway: GatewayProcess) -> Rollout:
    given = httpx.post(f"{gateway.url}/init_trajectory", json={}, timeout=120).json()
    return Rollout(f"/{given['trajectory_uid']}/{given['prompt_uid']}", [])


def answered_by_a_dying_gateway(
    rollout: Rollout, gateway: GatewayProcess, engine: FakeEngine, namespace: str, spool: Path | None = None
) -> None:
    """The agent reads an answer, and the gateway is killed with its step, as soon as that is in the spool if there is
    one: the shard stands still from the middle of the answer on."""
    shard, ticks = pid_of("data_pool", namespace), engine.ticks_passed
    with ThreadPoolExecutor(1) as agent:
        answering = agent.submit(rollout.ask, gateway)
        wait_until(lambda: engine.ticks_passed > ticks, "the answer to begin")
        os.kill(shard, signal.SIGSTOP)
        try:
            answering.result()
            wait_until(lambda: spool is None or spooled(spool) == 1, "the step in the spool")
            gateway.kill()
        finally:
            os.kill(shard, signal.SIGCONT)


def waiting_steps(gateway: GatewayProcess) -> float:
    found = re.search(r"^stepwell_waiting_steps (\S+)$", httpx.get(f"{gateway.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def trained(namespace: str) -> list[str]:
    """What a trainer gets of the rollouts that are ready, with its defaults."""
    pool, found = DataPool(PoolClient("data_pool", namespace)), list[str]()
    with suppress(FetchTimeout):
        while True:
            found += [text for _, text in texts_of(pool.fetch_batch(1, timeout=3.0).steps())]
    return found


def test_of_a_dead_gateways_rollouts_those_that_lack_a_call_are_left_out_and_no_others(
    start_named: StartNamed, unique_engine: FakeEngine, namespace: str
) -> None:
    start_pool(PoolPlan(), namespace)
    with start_named("first") as first, start_named("second") as second:
        whole, truncated = opened(first), opened(first)
        for rollout, gateway in ((whole, first), (whole, second), (truncated, first)):
            rollout.ask(gateway)
        wait_until(lambda: waiting_steps(second) == 0, "the step to be delivered")
        answered_by_a_dying_gateway(truncated, second, unique_engine, namespace)
        for rollout in (whole, truncated):
            rollout.complete(first)
    assert sorted(trained(namespace)) == sorted(whole.read)
    left_out = DataPool(PoolClient("data_pool", namespace)).stats().channels["train"].left_out
    assert left_out[INCOMPLETE].steps == 1


def test_a_gateway_that_is_back_with_its_spool_before_the_end_leaves_nothing_out(
    start_named: StartNamed, unique_engine: FakeEngine, namespace: str, tmp_path: Path
) -> None:
    start_pool(PoolPlan(), namespace)
    spool = tmp_path / "gateway.spool"
    with start_named("first") as first:
        with start_named("second", spool=spool) as second:
            rollout = opened(first)
            rollout.ask(first)
            answered_by_a_dying_gateway(rollout, second, unique_engine, namespace, spool)
        with start_named("third", spool=spool) as third:
            wait_until(lambda: waiting_steps(third) == 0, "the step to be delivered")
            rollout.complete(first)
    assert trained(namespace) == rollout.read
