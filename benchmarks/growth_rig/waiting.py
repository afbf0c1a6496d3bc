"""What waiting costs: 1 to 256 consumers in a fetch, then 1 to 256 producers, each with one step on its way.

One shard for each size, a real Ray actor with a journal (`--sync normal`, so that the disk's time is not measured). All
clients are in this process, each with a PoolClient of its own, as if each were a process. The delivery of a group is
measured from its submission to the one fetch that gets it; the consumer asks for the next one at once, so their number
stays.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from stepwell.pool.actors import start_pool

from benchmarks.gateway_rig.ours import pid_of_shard
from benchmarks.gateway_rig.processes import exact_cpu_seconds, memory_bytes
from benchmarks.growth_rig.curve import Curve, Shape
from benchmarks.growth_rig.rollouts import group_of
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import JournalSync, Limits, PoolPlan
from stepwell.pool.client import PoolClient

CONSUMERS, PRODUCERS = "waiting_consumers", "waiting_producers"
SIZES, QUICK_SIZES = (1, 16, 256), (1, 16)
LONG = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured at each size."""

    deliveries: int
    seconds: float
    """For which producers send, and consumers wait in vain."""
    settling: float
    """Seconds until all that were woken wait again."""


FULL, QUICK = Extent(deliveries=30, seconds=8.0, settling=1.0), Extent(deliveries=4, seconds=0.5, settling=0.2)

CONSUMER_CURVES = (
    Curve(
        axis=CONSUMERS,
        name="idle_cores",
        unit="cores of the shard, nothing arrives",
        shape=Shape.LINEAR,
        reason="A waiting call is a coroutine; measured while each of them looked again once a second.",
    ),
    Curve(
        axis=CONSUMERS,
        name="unready_cpu_ms",
        unit="ms CPU of the shard for a step that makes nothing ready",
        shape=Shape.LINEAR,
        reason="Nobody is woken; measured while each waiting call looked whether what is ready had changed.",
    ),
    Curve(
        axis=CONSUMERS,
        name="delivery_cpu_ms",
        unit="ms CPU of the shard for a group that arrives",
        shape=Shape.LINEAR,
        reason="What is ready has changed: each waiting fetch is told, one gets the group, the others wait again.",
    ),
    Curve(
        axis=CONSUMERS,
        name="delivery_ms",
        unit="ms from submission to its consumer",
        shape=Shape.LINEAR,
        reason="The same: the shard answers them one after the other.",
    ),
    Curve(
        axis=CONSUMERS,
        name="shard_mb",
        unit="MB resident in the shard",
        shape=Shape.FLAT,
        reason="A waiting call is one coroutine.",
    ),
)
PRODUCER_CURVES = (
    Curve(
        axis=PRODUCERS,
        name="step_cpu_us",
        unit="µs CPU of the shard for a step in a message of its own",
        shape=Shape.FLAT,
        reason="Each message is handled once, and one commit serves all messages that are under way.",
    ),
    Curve(
        axis=PRODUCERS,
        name="wait_ms",
        unit="ms until it is acknowledged",
        shape=Shape.LINEAR,
        reason="The shard is one process: each message waits for those that came before it.",
    ),
)


@dataclass(slots=True)
class Shard:
    """The pool, of one shard."""

    plan: PoolPlan
    namespace: str
    pid: int = 0
    numbers: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        start_pool(self.plan, self.namespace)
        self.pid = pid_of_shard(self.plan.name, self.namespace)

    def client(self) -> PoolClient:
        return PoolClient(self.plan.name, self.namespace)

    async def send(self, client: PoolClient, missing: int = 0) -> str:
        """A step, in a group of which so many more are missing. Returns its prompt_uid, once it is acknowledged."""
        prompt_uid = f"p{next(self.numbers)}"
        (verdict,) = await client.submit_groups(*group_of(prompt_uid, 1, missing))
        assert verdict == "accepted", verdict
        return prompt_uid


class WaitingConsumers:
    def __init__(self, shard: Shard, consumers: int) -> None:
        self._shard = shard
        self._producer = shard.client()
        self._clients = [shard.client() for _ in range(consumers)]
        self._taken: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

    async def measure(self, extent: Extent) -> dict[str, float]:
        async with asyncio.TaskGroup() as consuming:
            tasks = [consuming.create_task(self._consume(client)) for client in self._clients]
            for _ in range(3):  # after which all of them wait
                await self._deliver()
            await asyncio.sleep(extent.settling)
            idle = await self._cpu_of(asyncio.sleep(extent.seconds)) / extent.seconds
            unready = await self._cpu_of(self._send_unready(extent), idle)
            latencies: list[float] = []
            delivered = await self._cpu_of(self._deliver_all(extent, latencies), idle)
            for task in tasks:
                task.cancel()
        await self._producer.clear("train")
        return {
            "idle_cores": idle,
            "unready_cpu_ms": unready / extent.deliveries * 1e3,
            "delivery_cpu_ms": delivered / extent.deliveries * 1e3,
            "delivery_ms": statistics.median(latencies) * 1e3,
            "shard_mb": memory_bytes(self._shard.pid) / 1e6,
        }

    async def _cpu_of(self, work: Awaitable[None], idle: float = 0.0) -> float:
        """Seconds of the shard, beyond what it takes anyway."""
        began, before = time.perf_counter(), exact_cpu_seconds(self._shard.pid)
        await work
        return exact_cpu_seconds(self._shard.pid) - before - idle * (time.perf_counter() - began)

    async def _send_unready(self, extent: Extent) -> None:
        for _ in range(extent.deliveries):
            await self._shard.send(self._producer, missing=1)
        await asyncio.sleep(extent.settling)

    async def _deliver_all(self, extent: Extent, latencies: list[float]) -> None:
        latencies += [await self._deliver() for _ in range(extent.deliveries)]
        await asyncio.sleep(extent.settling)

    async def _deliver(self) -> float:
        """Seconds from the submission of a group to its consumer."""
        began = time.perf_counter()
        sent = await self._shard.send(self._producer)
        async with asyncio.timeout(60.0):
            taken, at = await self._taken.get()
        assert taken == sent
        return at - began

    async def _consume(self, client: PoolClient) -> None:
        while True:
            batch = await client.fetch_batch(1, timeout=LONG)
            self._taken.put_nowait((batch.columns.prompt_uids[0], time.perf_counter()))


async def measure_producers(shard: Shard, producers: int, seconds: float) -> dict[str, float]:
    clients = [shard.client() for _ in range(producers)]
    await asyncio.gather(*map(shard.send, clients))  # finds the actor
    waits: list[float] = []
    until = time.perf_counter() + seconds

    async def produce(client: PoolClient) -> None:
        while (began := time.perf_counter()) < until:
            await shard.send(client)
            waits.append(time.perf_counter() - began)

    before = exact_cpu_seconds(shard.pid)
    await asyncio.gather(*map(produce, clients))
    used = exact_cpu_seconds(shard.pid) - before
    await clients[0].clear("train")
    return {"step_cpu_us": used / len(waits) * 1e6, "wait_ms": statistics.median(waits) * 1e3}


def measure(cluster: RayCluster, folder: Path, quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    sizes, extent = (QUICK_SIZES, QUICK) if quick else (SIZES, FULL)
    for size in sizes:
        journals = folder / f"journals-{size}"
        journals.mkdir()
        plan = PoolPlan(journal=str(journals), sync=JournalSync.NORMAL, limits=Limits(max_queue_size=10**6))
        with cluster.namespace() as namespace:
            shard = Shard(plan, namespace)
            asyncio.run(measure_producers(shard, 1, extent.seconds / 4))  # warms up
            consuming = asyncio.run(WaitingConsumers(shard, size).measure(extent))
            producing = asyncio.run(measure_producers(shard, size, extent.seconds))
        for axis, told in ((CONSUMERS, consuming), (PRODUCERS, producing)):
            print(f"{axis}: {size}: " + ", ".join(f"{name} {value:.3g}" for name, value in told.items()), flush=True)
            figures |= {f"{axis}_{name}_at_{size}": value for name, value in told.items()}
    return figures
