"""What a pool costs that has 1 to 64 shards: real Ray actors, all on this machine, without journals.

The load is the same for each number. On one machine more shards are not faster; what is measured is whether one more
shard makes a step or a call dearer.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

from stepwell.pool.actors import start_pool

from benchmarks.gateway_rig.ours import pid_of_shard
from benchmarks.gateway_rig.processes import exact_cpu_seconds, memory_bytes
from benchmarks.growth_rig.curve import Curve, Shape
from benchmarks.growth_rig.rollouts import group_of
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from stepwell.steps.step import Step

AXIS = "shards"
SIZES, QUICK_SIZES = (1, 4, 16, 64), (1, 4)
START_TIMEOUT = 400.0
"""Ray starts as many at once as there are cores."""
GROUP, FLUSH, FETCHED = 8, 64, 64
"""Trajectories in a group; groups of one trajectory in a flush; groups in a batch."""
REPEATS, QUICK_REPEATS = 40, 4
IDLE = 5.0
"""Seconds."""

CURVES = (
    Curve(
        axis=AXIS,
        name="group_cpu_us",
        unit="µs CPU a step, sent as groups",
        shape=Shape.FLAT,
        reason="prompt_uid names the one shard of a group, and no other hears of it.",
    ),
    Curve(
        axis=AXIS,
        name="group_all_cpu_us",
        unit="µs CPU a step, sent as groups, with what the shards need idle",
        shape=Shape.FLAT,
        reason="The same, with the idle time of all shards: groups are sent one after the other.",
    ),
    Curve(
        axis=AXIS,
        name="flush_cpu_us",
        unit="µs CPU a step, sent in flushes of 64 groups",
        shape=Shape.LINEAR,
        reason="A flush is one message to each shard that it has steps for, so at most one a step.",
    ),
    Curve(
        axis=AXIS,
        name="call_ms",
        unit="ms for a call about one trajectory",
        shape=Shape.FLAT,
        reason="It asks the one shard of the group.",
    ),
    Curve(
        axis=AXIS,
        name="fetch_ms",
        unit="ms to fetch and acknowledge 64 groups",
        shape=Shape.LINEAR,
        reason="Every shard is asked what it has, and each of them hands out its part and is told that it arrived.",
    ),
    Curve(
        axis=AXIS,
        name="stats_ms",
        unit="ms for stats()",
        shape=Shape.LINEAR,
        reason="Every shard is asked, all at once.",
    ),
    Curve(
        axis=AXIS,
        name="idle_cores",
        unit="cores, idle",
        shape=Shape.LINEAR,
        reason="Each shard asks Ray's head every two seconds whether it is still known.",
    ),
    Curve(
        axis=AXIS,
        name="resident_mb",
        unit="MB resident, empty",
        shape=Shape.LINEAR,
        reason="Each shard is a Python process with Ray in it.",
    ),
)


class ShardedPool:
    """A pool of so many shards, and what its processes cost."""

    def __init__(self, shards: int, namespace: str) -> None:
        plan = PoolPlan(shards=shards, limits=Limits(max_queue_size=10**6))
        start_pool(plan, namespace, timeout=START_TIMEOUT)
        self.client = PoolClient(plan.name, namespace)
        self._numbers = count()
        self._pids = [pid_of_shard(name, namespace) for name in plan.shard_names()]

    def cpu(self) -> float:
        """Of all shards."""
        return exact_cpu_seconds(*self._pids)

    def resident_mb(self) -> float:
        return sum(map(memory_bytes, self._pids)) / 1e6

    def group(self, size: int) -> tuple[list[Step], list[Registration]]:
        return group_of(f"p{next(self._numbers)}", size)

    def flush(self) -> tuple[list[Step], list[Registration]]:
        groups = [self.group(1) for _ in range(FLUSH)]
        return [step for steps, _ in groups for step in steps], [one for _, ones in groups for one in ones]

    async def empty(self) -> None:
        await self.client.clear("train")


async def _ms(repeats: int, call: Callable[[], Awaitable[object]]) -> float:
    await call()  # finds its actors
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


async def _cpu_us(
    pool: ShardedPool, repeats: int, idle: float, make: Callable[[], tuple[list[Step], list[Registration]]]
) -> tuple[float, float]:
    """A step, of the shards and of this process, their client: without the cores that the shards need idle, and with
    them. Messages are sent one after the other."""
    await pool.client.submit_groups(*make())
    messages = [make() for _ in range(repeats)]
    began, before, client = time.perf_counter(), pool.cpu(), time.process_time()
    for steps, registrations in messages:
        await pool.client.submit_groups(steps, registrations)
    used, took = time.process_time() - client + pool.cpu() - before, time.perf_counter() - began
    await pool.empty()
    each = 1e6 / sum(len(steps) for steps, _ in messages)
    return (used - idle * took) * each, used * each


async def _measure_pool(pool: ShardedPool, repeats: int, seconds: float) -> dict[str, float]:
    figures = {"resident_mb": pool.resident_mb()}
    for _ in range(3):  # every shard is found, and every connection is made
        await pool.client.submit_groups(*pool.flush())
        await pool.client.stats()
    await pool.empty()
    before = pool.cpu()
    await asyncio.sleep(seconds)
    figures["idle_cores"] = idle = (pool.cpu() - before) / seconds
    figures["group_cpu_us"], figures["group_all_cpu_us"] = await _cpu_us(
        pool, repeats * 8, idle, lambda: pool.group(GROUP)
    )
    figures["flush_cpu_us"], _ = await _cpu_us(pool, repeats, idle, pool.flush)
    figures["call_ms"] = await _ms(repeats * 4, lambda: pool.client.channel_if_open("t", f"q{os.urandom(4).hex()}"))
    figures["stats_ms"] = await _ms(repeats, pool.client.stats)

    for _ in range(repeats + 1):
        await pool.client.submit_groups(*pool.flush())
    figures["fetch_ms"] = await _ms(repeats, lambda: pool.client.fetch_batch(FETCHED))
    return figures


def measure(cluster: RayCluster, folder: Path, quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    sizes = QUICK_SIZES if quick else SIZES
    repeats, seconds = (QUICK_REPEATS, 1.0) if quick else (REPEATS, IDLE)
    for size in sizes:
        with cluster.namespace() as namespace:
            began = time.perf_counter()
            pool = ShardedPool(size, namespace)
            print(f"{AXIS}: {size} started in {time.perf_counter() - began:.0f} s", flush=True)
            told = asyncio.run(_measure_pool(pool, repeats, seconds))
        print(f"{AXIS}: {size}: " + ", ".join(f"{name} {value:.3g}" for name, value in told.items()), flush=True)
        figures |= {f"{AXIS}_{name}_at_{size}": value for name, value in told.items()}
    return figures
