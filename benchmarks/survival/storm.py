"""One of two shards stands still for a second and is killed, while many agents work: do completions recover?

The load is that of 10,000 agents (docs/operations/scaling.md, "Size a deployment"), scaled to the cores of this
machine, on which agents and engine run too. Each gateway has rollouts of its own, as behind a balancer that keeps them
together. The engine answers at once.
"""

import asyncio
import math
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import READY_TIMEOUT, SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome

SHARDS = 2
AGENTS = 10_000
CORES = 16
"""For so many agents with their gateways, shards, clients and the fake engine."""
STOPPED = 1.0
WINDOW = 5.0
"""Seconds after the shard is back in which completions are asked whose p99 is a goal."""
MOST_P99 = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    gateways: int
    agents: int
    call_interval: float
    """Seconds between two calls of an agent."""
    most_calls: int
    """Of a rollout, which has half as many on average."""
    warm_up: float
    observed: float
    """Seconds after the shard is back."""


def full(cores: int) -> Extent:
    agents = min(AGENTS, AGENTS * cores // CORES)
    return Extent(gateways=17, agents=agents, call_interval=20.0, most_calls=19, warm_up=90.0, observed=60.0)


QUICK = Extent(gateways=3, agents=24, call_interval=0.5, most_calls=5, warm_up=4.0, observed=WINDOW)


@dataclass(slots=True)
class StormAuditor(Auditor):
    """Notes how long each completion took, from when the agent first asked for it."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note_completed(self, trajectory_uid: str) -> None:
        Auditor.note_completed(self, trajectory_uid)
        self.seconds[trajectory_uid] = time.monotonic() - self.ended_at[trajectory_uid]

    def completion_p99(self, since: float, until: float, now: float) -> float:
        """Of those asked for in this time. One without an answer has taken the time up to now."""
        took = sorted(
            self.seconds.get(uid, now - asked) for uid, asked in self.ended_at.items() if since <= asked < until
        )
        return round(took[math.ceil(0.99 * len(took)) - 1], 2) if took else math.inf

    def recovered(self, back: float, now: float) -> float:
        """Seconds after the shard is back in which completions were still asked for that took too long."""
        slow = [asked - back for uid, asked in self.ended_at.items() if self.seconds.get(uid, now - asked) > MOST_P99]
        return round(max([0.0, *slow]), 1)


@dataclass(slots=True)
class SpreadLoad(AgentLoad):
    """Agents that do not begin at the same moment."""

    number: int = 0
    """Of these agents among others, which act at other times."""

    async def _agent(self, http: aiohttp.ClientSession, chance: random.Random, rollouts: int | None) -> None:
        own = random.Random(f"{self.number} {chance.random()}")
        await asyncio.sleep(own.random() * self.pause)
        await AgentLoad._agent(self, http, own, rollouts)


class FlushStorm:
    name = "storm"
    fault = "one of 2 shards stopped (SIGSTOP) for 1 s, then killed; 17 gateways; the load of 10,000 agents, scaled"

    async def run(self, *, quick: bool) -> RowOutcome:
        extent = QUICK if quick else full(os.cpu_count() or 1)
        auditor = StormAuditor()
        async with survival_cluster(gateways=extent.gateways, shards=SHARDS) as cluster:
            working = asyncio.gather(*(load.run(agents) for load, agents in _loads(extent, cluster.urls, auditor)))
            training = asyncio.create_task(auditor.follow(cluster.pool))
            await asyncio.sleep(extent.warm_up)
            began = time.monotonic()
            await _stop_and_kill(cluster, (await cluster.pool.shards.names())[-1])
            back = time.monotonic()
            await asyncio.sleep(extent.observed)
            now = time.monotonic()
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            await auditor.drain(cluster.pool)
            await training
        figures = auditor.figures() | {
            "agents": extent.agents,
            "scale_percent": 100 * extent.agents / AGENTS,
            "gateways": extent.gateways,
            "answers_503": auditor.statuses[503],
            "away_s": round(back - began, 1),
            "completion_p99_before_s": auditor.completion_p99(began - extent.warm_up, began - STOPPED, now),
            "completion_p99_s": auditor.completion_p99(back, back + WINDOW, now),
            "recovered_s": auditor.recovered(back, now),
        }
        most = {"answers_503": 0, "completion_p99_s": MOST_P99, **NOTHING_LOST}
        return RowOutcome(figures, most, {"answered_percent": 100.0})


def _loads(extent: Extent, urls: list[str], auditor: Auditor) -> list[tuple[AgentLoad, int]]:
    """For each gateway, with the number of its agents."""
    return [
        (
            SpreadLoad([url], auditor, pause=extent.call_interval, most_calls=extent.most_calls, number=n),
            extent.agents * (n + 1) // len(urls) - extent.agents * n // len(urls),
        )
        for n, url in enumerate(urls)
    ]


async def _stop_and_kill(cluster: SurvivalCluster, shard: str) -> None:
    """Returns when the shard answers again."""
    process = cluster.shard_pid(shard)
    os.kill(process, signal.SIGSTOP)
    await asyncio.sleep(STOPPED)
    os.kill(process, signal.SIGKILL)
    await cluster.pool.shards.at(shard, timeout=READY_TIMEOUT).plan()
