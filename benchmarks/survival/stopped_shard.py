"""One shard of several does not answer, as a process that is stopped or swapped out."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

from benchmarks.survival.auditor import Auditor
from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from stepwell.errors import StepwellError

SHARDS = 4
FAILED = float("inf")


class StoppedShard:
    name = "stopped_shard"
    fault = "one of 4 shards stopped (SIGSTOP) for 60 s"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        seconds = 5.0 if quick else 60.0
        async with survival_cluster(shards=SHARDS) as cluster:
            load = AgentLoad(cluster.urls, auditor)
            working = asyncio.create_task(load.run(4 if quick else 16))
            await asyncio.sleep(2.0)
            slowest = await self._stop_shard(cluster, seconds)
            load.stopped.set()
            await working
            await auditor.drain(cluster.pool)
        figures = auditor.figures() | {f"{name}_s": round(value, 2) for name, value in slowest.items()}
        nothing = ("empty_rollouts", "truncated_rollouts", "steps_lost", "steps_twice")
        most = {**{f"{name}_s": 2.0 for name in slowest}, **dict.fromkeys(nothing, 0)}
        return RowOutcome(figures, most, {"answered_percent": 100.0})

    async def _stop_shard(self, cluster: SurvivalCluster, seconds: float) -> dict[str, float]:
        """The slowest answers of the pool while the shard is stopped."""
        victim = cluster.shard_pid((await cluster.pool.shards.names())[-1])
        slowest = {"pacing": 0.0, "stats": 0.0}
        questions: dict[str, Callable[[], Awaitable[object]]] = {
            "pacing": lambda: cluster.pool.pacing("train"),
            "stats": cluster.pool.stats,
        }
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        try:
            while time.monotonic() - began < seconds:
                for name, ask in questions.items():
                    slowest[name] = max(slowest[name], await _time(ask))
                await asyncio.sleep(0.5)
        finally:
            os.kill(victim, signal.SIGCONT)
        return slowest


async def _time(ask: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    try:
        await ask()
    except StepwellError:
        return FAILED
    return time.monotonic() - began
