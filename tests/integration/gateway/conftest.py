from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.fake_engine import FakeEngine
from rig.gateways import GatewayProcess, gateway_process
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient

StartGateway = Callable[..., AbstractContextManager[GatewayProcess]]


@pytest.fixture
def engine_thread() -> Iterator[FakeEngine]:
    with in_thread(FakeEngine()) as engine:
        yield engine


@pytest.fixture
def data_pool(namespace: str) -> DataPool:
    start_pool(PoolPlan(), namespace)
    return DataPool(PoolClient("data_pool", namespace))


@pytest.fixture
def start_gateway(
    ray_cluster: RayCluster, namespace: str, engine_thread: FakeEngine, tiny_model: Path, tmp_path: Path
) -> StartGateway:
    """Starts the real command with every flag of the seed's, each of which a test may change."""

    def start(**changes: object) -> AbstractContextManager[GatewayProcess]:
        flags = {
            "data_pool_name": "data_pool",
            "vllm_addresses": engine_thread.url,
            "tokenizer_path": tiny_model,
            "ray_address": ray_cluster.address,
            "ray_namespace": namespace,
            **changes,
        }
        return gateway_process(tmp_path / "gateway.log", **flags)  # type: ignore[arg-type]

    return start
