"""The cluster of a row: a Ray head, nodes, a pool that is kept, gateways as processes, a fake engine."""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rig.fake_engine import FakeEngine
from rig.gateways import GatewayProcess, free_port, gateway_process
from rig.ray_nodes import RayNodes, ray_nodes, redis_server
from rig.threads import in_thread
from stepwell.errors import PoolUnavailable
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink

POOL = "data_pool"
READY_TIMEOUT = 240.0
"""Seconds. On a busy machine it takes more than half a minute only to join Ray."""
POOL_NODE: Mapping[str, Any] = {"resources": {"pool": 1}}
"""A node on which any number of shards may run."""
LOG_LINES = 15
"""Of each log that is shown if a row fails."""


class GatewayFleet:
    """The gateways of a row. One that was killed can be started again, with its address and its spool."""

    def __init__(self, stack: ExitStack, folder: Path, env: Mapping[str, str], flags: Mapping[str, object]) -> None:
        self.processes: list[GatewayProcess] = []
        self._stack = stack
        self._folder = folder
        self._env = dict(env)
        self._flags = flags
        self._ports: list[int] = []

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.processes]

    def add(self) -> None:
        self._ports.append(free_port())
        self.processes.append(self._start(len(self._ports) - 1))

    def start_again(self, index: int) -> None:
        self.processes[index] = self._start(index)

    def _start(self, index: int) -> GatewayProcess:
        log = self._folder / f"gateway-{index}.log"
        given = {"spool": self._folder / f"spool-{index}", **self._flags}
        flags = {name: value for name, value in given.items() if value is not None}
        return self._stack.enter_context(gateway_process(log, port=self._ports[index], env=self._env, **flags))


@dataclass(frozen=True, slots=True)
class SurvivalCluster:
    nodes: RayNodes
    engine: FakeEngine
    fleet: GatewayFleet
    pool: PoolClient
    """Reaches the pool by a link of its own, so that this process survives too."""
    folder: Path
    """Has the logs and, unless the row says otherwise, the journals and the spools."""
    journal: Path = field(default_factory=Path)

    @property
    def gateways(self) -> Sequence[GatewayProcess]:
        return self.fleet.processes

    @property
    def urls(self) -> list[str]:
        return self.fleet.urls

    def shard_pid(self, shard: str) -> int:
        """The process that has the shard's journal open. LookupError if there is none."""
        journal = self.journal / f"{shard}.sqlite"
        for process in Path("/proc").glob("[0-9]*"):
            if _has_open(process, journal):
                return int(process.name)
        raise LookupError(f"no process has {journal} open")

    async def reading(self, metric: str) -> float:
        """The sum of a metric over all gateways that answer, and over all labels."""
        total = 0.0
        async with aiohttp.ClientSession() as http:
            for url in self.urls:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with http.get(f"{url}/metrics") as answer:
                        found = re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
                        total += sum(map(float, found))
        return total


@asynccontextmanager
async def survival_cluster(
    *,
    gateways: int = 1,
    shards: int = 1,
    nodes: Sequence[Mapping[str, Any]] = (POOL_NODE,),
    redis: bool = False,
    ray: RayNodes | None = None,
    gateway_env: Mapping[str, str] | None = None,
    gateway_flags: Mapping[str, object] | None = None,
    **pool: Any,
) -> AsyncIterator[SurvivalCluster]:
    """`nodes` are the nodes besides the head's, by the parameters of RayNodes.add_node; shards live on those that offer
    the resource "pool". `ray` is a cluster that the row has started itself; nodes are added to it.

    `pool` are flags of `stepwell pool`, `gateway_flags` those of `stepwell gateway`; None leaves one out.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="survival-")))
        stack.enter_context(logs_of_failure(folder))
        engine = stack.enter_context(in_thread(FakeEngine()))
        if ray is None:
            address = stack.enter_context(redis_server()) if redis else None
            ray = await asyncio.to_thread(stack.enter_context, ray_nodes(address))
        for node in nodes:
            await asyncio.to_thread(ray.add_node, **node)
        flags = {"name": POOL, "shards": shards, "journal": folder / "journal", "resource": "pool", **pool}
        stack.enter_context(kept_pool(ray, folder / "pool.log", flags))
        link = RayLink(ray.address, "default")
        await asyncio.to_thread(link.start)
        stack.push_async_callback(link.close)
        client = PoolClient(POOL, transport=link)
        await until_ready(client)
        given = {
            "data_pool_name": POOL,
            "vllm_addresses": engine.url,
            "tokenizer_path": "no/such/folder",
            "ray_address": ray.address,
            **(gateway_flags or {}),
        }
        fleet = GatewayFleet(stack.enter_context(ExitStack()), folder, gateway_env or {}, given)
        for _ in range(gateways):
            await asyncio.to_thread(fleet.add)
        yield SurvivalCluster(ray, engine, fleet, client, folder, Path(flags["journal"]))


@contextmanager
def kept_pool(ray: RayNodes, log: Path, flags: Mapping[str, object]) -> Iterator[None]:
    line = [sys.executable, "-m", "stepwell", "pool", "--keep", "--ray-address", ray.address]
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        line += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def logs_of_failure(folder: Path) -> Iterator[None]:
    """The logs are gone with the folder."""
    try:
        yield
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            last = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            print(f"-- {log.name}", *last, sep="\n", file=sys.stderr)
        raise


async def until_ready(client: PoolClient) -> None:
    deadline = time.monotonic() + READY_TIMEOUT
    while True:
        try:
            return await client.check()
        except PoolUnavailable as away:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {READY_TIMEOUT:g} s for the pool: {away}") from away
            await asyncio.sleep(0.2)


def _has_open(process: Path, file: Path) -> bool:
    try:
        return any(descriptor.readlink() == file for descriptor in (process / "fd").iterdir())
    except OSError:
        return False
