"""One shard of several does not answer, as a process that is stopped or swapped out."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from stepwell.errors import StepwellError
from stepwell.pool.client import PoolClient

SHARDS = 4
BEFORE = 2.0
"""Seconds of load before the fault."""
PAUSE = 0.5
"""Seconds between two rounds of questions."""
NO_ANSWER = float("inf")


class NamesMissing(Protocol):
    @property
    def missing(self) -> tuple[str, ...]: ...


class StoppedShard:
    name = "stopped_shard"
    fault = "one of 4 shards stopped (SIGSTOP) for 60 s"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        seconds = 5.0 if quick else 60.0
        async with survival_cluster(shards=SHARDS) as cluster:
            load = AgentLoad(cluster.urls, auditor)
            working = asyncio.create_task(load.run(4 if quick else 16))
            await asyncio.sleep(BEFORE)
            shard = (await cluster.pool.shards.names())[-1]
            with stopped(cluster, shard):
                questions = Questions(cluster.pool, shard)
                await questions.repeat(seconds)
            load.stopped.set()
            await working
            await auditor.drain(cluster.pool)
        slowest = {f"{name}_s": round(longest, 2) for name, longest in questions.slowest.items()}
        figures = auditor.figures() | slowest | {"shard_not_named": questions.unnamed}
        most = {**dict.fromkeys(slowest, 2.0), "shard_not_named": 0, **NOTHING_LOST}
        return RowOutcome(figures, most, {"answered_percent": 100.0})


class Questions:
    """To a pool of which one shard does not answer."""

    def __init__(self, pool: PoolClient, away: str) -> None:
        self._asked: Mapping[str, Callable[[], Awaitable[NamesMissing]]] = {
            "pacing": lambda: pool.pacing("train"),
            "stats": pool.stats,
            "ready_groups": lambda: pool.ready_groups("train"),
        }
        self._away = away
        self.slowest = dict.fromkeys(self._asked, 0.0)
        """Seconds."""
        self.unnamed = 0
        """Answers that do not say that this shard, and no other, is missing."""

    async def repeat(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name, ask in self._asked.items():
                self.slowest[name] = max(self.slowest[name], await self._time(ask))
            await asyncio.sleep(PAUSE)

    async def _time(self, ask: Callable[[], Awaitable[NamesMissing]]) -> float:
        began = time.monotonic()
        try:
            answer = await ask()
        except StepwellError:
            return NO_ANSWER
        self.unnamed += answer.missing != (self._away,)
        return time.monotonic() - began


@contextmanager
def stopped(cluster: SurvivalCluster, shard: str) -> Iterator[None]:
    process = cluster.shard_pid(shard)
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
