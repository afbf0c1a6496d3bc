"""The number of shards changes under load, up and down, while agents work and a trainer trains."""

import asyncio
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL, POOL_NODE, SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from rig.waiting import until

GATEWAYS, AGENTS = 2, 16
GROUP_SIZE = 2
"""Rollouts of a group begin at different times, so that some groups have one before a change and one after it."""
MOST_P99 = 1.5
"""The p99 of a phase may be so many times that before the first change, and counts as unchanged: it varies."""
WARM_UP = 3.0
"""Seconds. The first calls of a gateway are slow."""
LEAVE_TIMEOUT = 240.0
LOOK_INTERVAL = 1.0


@dataclass(slots=True)
class PhaseAuditor(Auditor):
    """Times calls by what happens meanwhile."""

    phase: str = "first_calls"
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def note_call(self, trajectory_uid: str, is_answered: bool, seconds: float) -> None:
        Auditor.note_call(self, trajectory_uid, is_answered, seconds)
        self.seconds[self.phase].append(seconds)

    async def seen_a_call(self) -> None:
        """On a busy machine a phase may pass without one."""
        await until(lambda: self.phase in self.seconds, f"a call in the phase {self.phase}")

    def p99_ms(self) -> dict[str, float]:
        return {
            f"p99_{phase}_ms": round(1000 * sorted(found)[math.ceil(0.99 * len(found)) - 1], 1)
            for phase, found in self.seconds.items()
        }


class ChangedShards:
    name = "resharding"
    fault = "shards 4 -> 8 -> 3 under load"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor, prompts = PhaseAuditor(), count()
        shards, agents, seconds = ((2, 3, 1), 4, 2.0) if quick else ((4, 8, 3), AGENTS, 15.0)
        async with survival_cluster(
            gateways=GATEWAYS,
            shards=shards[0],
            nodes=[POOL_NODE] * (1 if quick else 2),
            group_size=GROUP_SIZE,
        ) as cluster:
            load = AgentLoad(cluster.urls, auditor, next_prompt=lambda: f"prompt-{next(prompts) // GROUP_SIZE}")
            working = asyncio.create_task(load.run(agents))
            training = asyncio.create_task(auditor.follow(cluster.pool))
            await asyncio.sleep(WARM_UP)
            auditor.phase = f"at_{shards[0]}"
            await asyncio.sleep(seconds)
            for number in shards[1:]:
                await auditor.seen_a_call()
                auditor.phase = f"to_{number}"
                await self._change(cluster, number)
                await auditor.seen_a_call()
                auditor.phase = f"at_{number}"
                await asyncio.sleep(seconds)
            await auditor.seen_a_call()
            left = {} if quick else {"left_s": await self._until_left(cluster, shards[-1])}
            load.stopped.set()
            await working
            if (made := next(prompts)) % GROUP_SIZE:  # the last group has one rollout only
                last = replace(load, stopped=asyncio.Event(), next_prompt=lambda: f"prompt-{made // GROUP_SIZE}")
                await last.run(1, rollouts=1)
            await auditor.drain(cluster.pool)
            await training
            drops = (await cluster.pool.stats()).channels["train"].dropped
            figures = auditor.figures() | {f"dropped_{cause}": count.steps for cause, count in drops.items()}
        p99 = auditor.p99_ms()
        ratio = max(p99[f"p99_{to}_{number}_ms"] for to in ("to", "at") for number in shards[1:])
        figures |= p99 | left | {"p99_ratio": round(ratio / p99[f"p99_at_{shards[0]}_ms"], 2)}
        most = {**NOTHING_LOST, **({} if quick else {"p99_ratio": MOST_P99, "left_s": LEAVE_TIMEOUT})}
        return RowOutcome(figures, most, {"answered_percent": 100.0})

    async def _change(self, cluster: SurvivalCluster, shards: int) -> None:
        """As an operator does."""
        flags = {"name": POOL, "shards": shards, "journal": cluster.journal, "resource": "pool"}
        await asyncio.to_thread(cluster.nodes.run, "pool", **flags)
        assert (await cluster.pool.shards.at(POOL).plan()).shards == shards

    async def _until_left(self, cluster: SurvivalCluster, shards: int) -> float:
        """Seconds until the shards that are too many have ended."""
        began = time.monotonic()
        while any(self._runs(cluster, index) for index in range(shards, 8)):
            if time.monotonic() - began > LEAVE_TIMEOUT:
                return math.inf
            await asyncio.sleep(LOOK_INTERVAL)
        return round(time.monotonic() - began, 1)

    def _runs(self, cluster: SurvivalCluster, index: int) -> bool:
        try:
            return cluster.shard_pid(f"{POOL}-{index}") > 0
        except LookupError:
            return False
