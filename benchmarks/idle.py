"""What an idle pool costs: messages a second that a shard gets from processes that only wait.

Each kind is measured by itself with real shards: a machine whose gateways share a link, a reward worker, a trainer that
waits for a batch and syncs weights, a dashboard. The figures for many are sums of these, for the first shard of a pool
and for any other.

    python -m benchmarks.idle
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from stepwell.pool.actors import start_pool

from benchmarks.report import report
from stepwell.errors import FetchTimeout
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.transport import ActorTransport
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link_messages import GatheringTransport
from stepwell.pool.client.shards import NEWS_WAIT
from stepwell.pool.shard.ray_transport import RayTransport

POOL, OTHER = "data_pool", "data_pool-1"
GATEWAYS_OF_A_MACHINE = 4
MACHINES, WORKERS, TRAINERS, DASHBOARDS = 50, 50, 1, 1
"""At 200 gateways and 100 shards."""
TICK = 1.0
"""Seconds between two reports of a gateway's engines, two announcements of a trainer, two polls of a dashboard."""


class CountingTransport:
    """What leaves for each shard, by method."""

    def __init__(self, transport: ActorTransport) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()
        self._transport = transport

    @property
    def connections(self) -> int:
        return self._transport.connections

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.sent[actor, method] += 1
        return await self._transport.call(actor, method, args, kwargs)


async def each_tick(call: Callable[[], Awaitable[object]]) -> None:
    while True:
        await call()
        await asyncio.sleep(TICK)


async def gateway(client: PoolClient) -> None:
    async def flush(_: str) -> None:
        return None

    report_engines = partial(client.report_engines, {"http://a": 1})
    await asyncio.gather(client.follow(), client.follow_flushes(flush), each_tick(report_engines))


async def worker(client: PoolClient) -> None:
    while True:
        await client.take_unscored(8, lease=60.0, timeout=30.0)


async def trainer(client: PoolClient) -> None:
    async def fetch() -> None:
        with suppress(FetchTimeout):
            await client.fetch_batch(8, timeout=60.0, lease=60.0)

    await asyncio.gather(each_tick(fetch), each_tick(client.announce_sync))


async def dashboard(client: PoolClient) -> None:
    cursors: dict[str, Any] = {}

    async def poll() -> None:
        cursors.update((await client.changes(cursors)).cursors)

    await each_tick(poll)


KINDS: dict[str, tuple[Callable[[PoolClient], Awaitable[None]], int]] = {
    "machine": (gateway, GATEWAYS_OF_A_MACHINE),
    "worker": (worker, 1),
    "trainer": (trainer, 1),
    "dashboard": (dashboard, 1),
}
"""Each with the number of its processes, which share a link."""


async def measure(namespace: str, seconds: float) -> dict[str, CountingTransport]:
    """What each kind sends in that time, all at once."""
    transports = {kind: CountingTransport(RayTransport(namespace)) for kind in KINDS}
    tasks = []
    for kind, (run, processes) in KINDS.items():
        link = GatheringTransport(transports[kind])
        clients = [PoolClient(POOL, namespace, transport=link) for _ in range(processes)]
        tasks += [asyncio.ensure_future(run(client)) for client in clients]
    await asyncio.sleep(5.0)  # the first questions are answered at once
    for transport in transports.values():
        transport.sent.clear()
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    return transports


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="for a minute only")
    seconds = NEWS_WAIT * (1.2 if parser.parse_args().quick else 6.0)
    began = time.monotonic()
    with start_ray() as cluster, cluster.namespace() as namespace:
        start_pool(PoolPlan(shards=2, limits=Limits(require_reward=True)), namespace)
        transports = asyncio.run(measure(namespace, seconds))
    figures: dict[str, float] = {}
    for shard, name in ((POOL, "first_shard"), (OTHER, "shard")):
        for kind, transport in transports.items():
            sent = sum(n for (to, _), n in transport.sent.items() if to == shard)
            figures[f"{kind}_to_{name}_per_s"] = round(sent / seconds, 4)
        counts = {"machine": MACHINES, "worker": WORKERS, "trainer": TRAINERS, "dashboard": DASHBOARDS}
        idle = sum(figures[f"{kind}_to_{name}_per_s"] * count for kind, count in counts.items())
        figures[f"idle_{name}_per_s"] = round(idle, 2)
    for name, value in figures.items():
        print(f"  {name:28} {value:>10g}")
    print(f"took {time.monotonic() - began:.0f} s")
    report(figures, {"idle_first_shard_per_s": 5, "idle_shard_per_s": 5})


if __name__ == "__main__":
    main()
