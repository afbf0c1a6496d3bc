"""The node of the shards is lost for good, with its disk, and another node takes its place.

With files, the shards must say that their journals are missing, and begin again with them only. With PostgreSQL, they
go on at the other node.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL, POOL_NODE, SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from rig.postgres import PostgresServer, postgres_server
from rig.ray_nodes import ray_nodes
from stepwell.errors import StepwellError
from stepwell.pool.api.plan import PoolPlan

SHARDS, AGENTS, MOST_CALLS = 2, 8, 60
BEFORE = 3.0
"""Seconds of load before the fault."""
SERVE_TIMEOUT = 120.0


class NodeLostWithFiles:
    name = "node_lost_sqlite"
    fault = "the node of the shards killed with its disk; SQLite"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor, seconds = Auditor(), 5.0 if quick else 30.0
        with ray_nodes() as ray:
            victim = ray.add_node(**POOL_NODE)
            async with survival_cluster(shards=SHARDS, ray=ray, nodes=()) as cluster:
                load = AgentLoad(cluster.urls, auditor, most_calls=MOST_CALLS)
                working = asyncio.create_task(load.run(2 if quick else AGENTS))
                await asyncio.sleep(BEFORE)
                lost = cluster.journal.with_name("lost")
                await asyncio.to_thread(ray.kill_node, victim)
                cluster.journal.rename(lost)
                await asyncio.to_thread(ray.add_node, **POOL_NODE)
                refused, empty = await self._ask(cluster, seconds)
                began = time.monotonic()
                lost.rename(cluster.journal)  # from a backup, say
                await until_answering(cluster)
                served = time.monotonic() - began
                load.stopped.set()
                await working
                await auditor.drain(cluster.pool)
        measured = {"refusals": refused, "empty_shards": empty, "served_after_restore_s": round(served, 1)}
        goals = {"empty_shards": 0, "served_after_restore_s": 30.0, **NOTHING_LOST}
        return RowOutcome(auditor.figures() | measured, goals, {"refusals": 1, "answered_percent": 100.0})

    async def _ask(self, cluster: SurvivalCluster, seconds: float) -> tuple[int, int]:
        """How often shards said that their journal is missing, so many seconds long, and how often one answered."""
        refused = answered = 0
        until = math.inf
        while time.monotonic() < until:
            for shard in PoolPlan(name=POOL, shards=SHARDS).shard_names():
                try:
                    await cluster.pool.shards.at(shard, timeout=2.0, await_restart=False).stats()
                    answered += 1
                except StepwellError as failure:
                    refused += "is missing or empty" in str(failure)
            if refused and until == math.inf:
                until = time.monotonic() + seconds
            await asyncio.sleep(0.5)
        return refused, answered


class NodeLostWithDatabase:
    name = "node_lost_postgres"
    fault = "the node of the shards killed with its disk; PostgreSQL"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with postgres_server() as server, ray_nodes() as ray:
            victim = ray.add_node(**POOL_NODE)
            async with survival_cluster(shards=SHARDS, ray=ray, nodes=(), journal=server.url) as cluster:
                load = AgentLoad(cluster.urls, auditor, most_calls=MOST_CALLS)
                working = asyncio.create_task(load.run(2 if quick else AGENTS))
                await asyncio.to_thread(ray.add_node, **POOL_NODE)
                await asyncio.sleep(BEFORE)
                before = epochs(server)
                began = time.monotonic()
                await asyncio.to_thread(ray.kill_node, victim)
                await until_opened(server, before)
                await until_answering(cluster)
                served = time.monotonic() - began
                load.stopped.set()
                await working
                await auditor.drain(cluster.pool)
        figures = auditor.figures() | {"served_s": round(served, 1)}
        return RowOutcome(figures, {"served_s": 30.0, **NOTHING_LOST}, {"answered_percent": 100.0})


def epochs(server: PostgresServer) -> list[int]:
    """How often each journal was opened."""
    names = (f"stepwell_{shard}" for shard in PoolPlan(name=POOL, shards=SHARDS).shard_names())
    read = "SELECT convert_from(value, 'UTF8') FROM \"{}\".meta WHERE key = 'epoch'"
    return [int(server.ask(read.format(name))) for name in names]


async def until_opened(server: PostgresServer, before: list[int]) -> None:
    """All journals were opened again."""

    async def is_opened() -> bool:
        now = await asyncio.to_thread(epochs, server)
        return all(new > old for new, old in zip(now, before, strict=True))

    await _until(is_opened)


async def until_answering(cluster: SurvivalCluster) -> None:
    async def answers() -> bool:
        try:
            return not (await cluster.pool.stats()).missing
        except StepwellError:
            return False

    await _until(answers)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SERVE_TIMEOUT):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)
