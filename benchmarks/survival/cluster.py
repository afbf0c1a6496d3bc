"""The cluster of a row: a Ray head, nodes, a pool that is kept, gateways as processes, a fake engine."""

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from stepwell.errors import PoolUnavailable
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink
from tests.rig.fake_engine import FakeEngine
from tests.rig.gateways import GatewayProcess, gateway_process
from tests.rig.ray_nodes import RayNodes, ray_nodes, redis_server
from tests.rig.threads import in_thread

POOL = "data_pool"
READY_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class SurvivalCluster:
    nodes: RayNodes
    gateways: Sequence[GatewayProcess]
    pool: PoolClient
    """Reaches the pool by a link of its own, so that this process survives too."""
    folder: Path

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def shard_pid(self, shard: str) -> int:
        """The process that has the shard's journal open."""
        journal = self.folder / "journal" / f"{shard}.sqlite"
        return next(int(process.name) for process in Path("/proc").glob("[0-9]*") if _has_open(process, journal))

    async def reading(self, metric: str) -> float:
        """The sum of a metric over all gateways and labels."""
        total = 0.0
        async with aiohttp.ClientSession() as http:
            for url in self.urls:
                async with http.get(f"{url}/metrics") as answer:
                    found = re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
                    total += sum(map(float, found))
        return total


@asynccontextmanager
async def survival_cluster(
    *, gateways: int = 1, shards: int = 1, nodes: int = 1, redis: bool = False, **pool: Any
) -> AsyncIterator[SurvivalCluster]:
    """Shards live on the further nodes, which offer the resource "pool"; the head has none."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(redis_server()) if redis else None
        engine = stack.enter_context(in_thread(FakeEngine()))
        ray = await asyncio.to_thread(stack.enter_context, ray_nodes(address))
        for _ in range(nodes):
            await asyncio.to_thread(ray.add_node, resources={"pool": 1})
        flags = {"name": POOL, "shards": shards, "journal": folder / "journal", "resource": "pool", **pool}
        stack.enter_context(kept_pool(ray, folder / "pool.log", flags))
        link = RayLink(ray.address, "default")
        await asyncio.to_thread(link.start)
        stack.push_async_callback(link.close)
        client = PoolClient(POOL, transport=link)
        await _until_ready(client)
        processes = stack.enter_context(ExitStack())
        started = [
            processes.enter_context(
                gateway_process(
                    folder / f"gateway-{n}.log",
                    data_pool_name=POOL,
                    vllm_addresses=engine.url,
                    tokenizer_path="no/such/folder",
                    ray_address=ray.address,
                    spool=folder / f"spool-{n}",
                )
            )
            for n in range(gateways)
        ]
        yield SurvivalCluster(ray, started, client, folder)


@contextmanager
def kept_pool(ray: RayNodes, log: Path, flags: dict[str, object]) -> Iterator[None]:
    line = [sys.executable, "-m", "stepwell", "pool", "--keep", "--ray-address", ray.address]
    for name, value in flags.items():
        line += [f"--{name.replace('_', '-')}", str(value)]
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def _until_ready(client: PoolClient) -> None:
    async with asyncio.timeout(READY_TIMEOUT):
        while True:
            try:
                return await client.check()
            except PoolUnavailable:
                await asyncio.sleep(0.2)


def _has_open(process: Path, file: Path) -> bool:
    try:
        return any(descriptor.readlink() == file for descriptor in (process / "fd").iterdir())
    except OSError:
        return False
