from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from stepwell.pool.actors import start_pool

from rig.gateways import GatewayProcess, gateway_process
from rig.ray_cluster import RayCluster
from rig.vllm_server import VllmServer, start_vllm
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import DataPool, PoolClient
from tests.e2e.episodes import Episode, open_episode
from tests.e2e.weights import NEW_LETTER, Weights, make_plain_model

RESPONSE_LENGTH = 4096
"""More than the engine's window holds, as where one gateway serves engines of several sizes."""


@pytest.fixture(scope="package")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The real engine, one for all that share it: a test that changes its weights puts the tiny model's back.

    It ends with the last test of this folder: an idle vLLM takes a part of a core from the tests that follow."""
    with start_vllm(tiny_model, log=tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server


@pytest.fixture(scope="package")
def namespace(ray_cluster: RayCluster) -> Iterator[str]:
    """One for this folder, with a pool that the tests share."""
    with ray_cluster.namespace() as name:
        start_pool(PoolPlan(), name)
        yield name


@pytest.fixture
def own_namespace(ray_cluster: RayCluster) -> Iterator[str]:
    """For a test that starts a pool of the usual name: the one in `namespace` is everybody's."""
    with ray_cluster.namespace() as name:
        yield name


@pytest.fixture(scope="package")
def pool(namespace: str) -> DataPool:
    return DataPool(PoolClient("data_pool", namespace))


@pytest.fixture(scope="package")
def gateway(
    ray_cluster: RayCluster,
    namespace: str,
    vllm: VllmServer,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayProcess]:
    """The real command between the real engine and the real pool, one for this folder."""
    with gateway_process(
        tmp_path_factory.mktemp("gateway") / "gateway.log",
        data_pool_name="data_pool",
        vllm_addresses=vllm.url,
        tokenizer_path=tiny_model,
        response_length=RESPONSE_LENGTH,
        ray_address=ray_cluster.address,
        ray_namespace=namespace,
    ) as gateway:
        yield gateway


@pytest.fixture
async def episode(gateway: GatewayProcess, pool: DataPool) -> AsyncIterator[Episode]:
    async with open_episode(gateway.url, pool) as episode:
        yield episode


@pytest.fixture(scope="session")
def plain_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights that write printable text; only the second writes NEW_LETTER."""
    old = make_plain_model(tmp_path_factory.mktemp("old"), seed=0, without=NEW_LETTER)
    return old, make_plain_model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture
async def weights(
    vllm: VllmServer, gateway: GatewayProcess, tiny_model: Path, plain_models: tuple[Path, Path]
) -> AsyncIterator[Weights]:
    """The first plain model, as version 1; afterwards the engine is as it was, and the gateway knows."""
    weights = Weights(vllm, gateway.url)
    try:
        await weights.load(plain_models[0], "1")
        yield weights
    finally:
        await weights.load(tiny_model, "default")
