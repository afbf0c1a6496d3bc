"""Ray's head is killed under load, and is back after a while."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome

AGENTS = 8
BEFORE = 3.0
"""Seconds of load before the fault."""
RESUME_TIMEOUT = 90.0
CALLS_PER_SECOND = 4
"""Of one agent. Rollouts are so long that agents call during the whole time."""
DELIVERED = "stepwell_delivered_steps_total"


@dataclass(frozen=True, slots=True)
class LostHead:
    """Without Redis, a new head knows nothing: nodes start again, and the pool is created from its journals."""

    away: float
    """Seconds."""
    redis: bool

    @property
    def name(self) -> str:
        return f"head_{self.away:g}s{'_redis' if self.redis else ''}"

    @property
    def fault(self) -> str:
        return f"head killed, back after {self.away:g} s, {'with' if self.redis else 'without'} Redis"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor, away = Auditor(), min(self.away, 3.0) if quick else self.away
        async with survival_cluster(redis=self.redis) as cluster:
            load = AgentLoad(cluster.urls, auditor, most_calls=int(CALLS_PER_SECOND * (away + BEFORE)))
            working = asyncio.create_task(load.run(2 if quick else AGENTS))
            await asyncio.sleep(BEFORE)
            resumed = await self._lose_head(cluster, away)
            load.stopped.set()
            await working
            await auditor.drain(cluster.pool)
            ended = sum(gateway.process.poll() is not None for gateway in cluster.gateways)
            memory = await cluster.reading("process_resident_memory_bytes")
        measured = {"resumed_s": round(resumed, 1), "gateways_ended": ended, "gateway_mb": round(memory / 1e6)}
        figures = auditor.figures() | measured
        most = {"resumed_s": 30.0, "gateways_ended": 0, **NOTHING_LOST}
        return RowOutcome(figures, most, {"answered_percent": 100.0})

    async def _lose_head(self, cluster: SurvivalCluster, away: float) -> float:
        """Seconds from the moment the head is back until a step is delivered to the pool."""
        await asyncio.to_thread(cluster.nodes.kill_head)
        await asyncio.sleep(away)
        await asyncio.to_thread(cluster.nodes.start_head)
        began = time.monotonic()
        delivered = await cluster.reading(DELIVERED)
        if not self.redis:
            await asyncio.to_thread(cluster.nodes.replace_nodes)
        while await cluster.reading(DELIVERED) == delivered:
            if time.monotonic() - began > RESUME_TIMEOUT:
                return float("inf")
            await asyncio.sleep(0.2)
        return time.monotonic() - began
