"""The wall clock of shards and gateways jumps by an hour while agents work and a trainer has a batch."""

import asyncio
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL_NODE, SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from rig.builders import make_step
from rig.preloads import SHIFTED_CLOCK, build, preloaded
from stepwell.errors import LeaseExpired
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.batch import Batch

HOUR = 3600.0
AGENTS = 8
BEFORE, AFTER = 3.0, 20.0
"""Seconds of load before and after the jump."""
DEADLINE = 600.0
"""Of groups, in seconds: less than an hour."""
HELD_GROUPS = 4


@dataclass(frozen=True, slots=True)
class ClockJump:
    hours: float

    @property
    def name(self) -> str:
        return f"clock_{'forward' if self.hours > 0 else 'back'}"

    @property
    def fault(self) -> str:
        return f"the wall clock of shards and gateways jumps by {self.hours:+g} h"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with tempfile.TemporaryDirectory(prefix="clock-") as name:
            shift = Path(name) / "shift"
            _set_clock(shift, 0.0)
            environment = preloaded(build(SHIFTED_CLOCK, Path(name)), CLOCK_SHIFT=shift)
            node: Mapping[str, Any] = {**POOL_NODE, "env_vars": environment}
            async with survival_cluster(
                gateways=2, shards=2, nodes=(node,), gateway_env=environment, group_deadline=DEADLINE
            ) as cluster:
                load = AgentLoad(cluster.urls, auditor)
                working = asyncio.create_task(load.run(AGENTS))
                await asyncio.sleep(BEFORE)
                held = await cluster.pool.fetch_batch(
                    HELD_GROUPS, lease=DEADLINE, min_exactness="retokenized", untrainable=True
                )
                training = asyncio.create_task(auditor.follow(cluster.pool))
                _set_clock(shift, self.hours * HOUR)
                await asyncio.sleep(5.0 if quick else AFTER)
                expired = await _acknowledge(cluster, auditor, held)
                load.stopped.set()
                await working
                await auditor.drain(cluster.pool)
                await training
                stats = await cluster.pool.stats()
                ahead = await _shard_clock(cluster) - time.time()
        dropped = sum(count.steps for channel in stats.channels.values() for count in channel.dropped.values())
        refused = stats.refused.total() - stats.refused["duplicate"]  # a step that is sent again is harmless
        measured = {"steps_dropped": dropped, "steps_refused": refused, "leases_expired": expired}
        most = {**NOTHING_LOST, **dict.fromkeys(measured, 0), "leases_lost": 0}
        jumped = round(ahead / self.hours)
        least = {"answered_percent": 100.0, "clock_jumped_s": 0.99 * HOUR}
        return RowOutcome(auditor.figures() | measured | {"clock_jumped_s": jumped}, most, least)


async def _acknowledge(cluster: SurvivalCluster, auditor: Auditor, held: Batch) -> int:
    """How many of the leases that were held over the jump have ended by it."""
    try:
        await cluster.pool.ack(held)
    except LeaseExpired:
        return len(held.leases)
    auditor.note_delivered(held.steps())
    return 0


async def _shard_clock(cluster: SurvivalCluster) -> float:
    """The wall clock of a shard: when a group is opened there."""
    await cluster.pool.register_trajectory(Registration("clock", "clock", "clock"))
    await cluster.pool.submit_steps([make_step("clock", "clock", uid="clock")])
    await cluster.pool.complete_trajectory("clock", "clock", 1.0)
    batch = await cluster.pool.fetch_batch(1, channel="clock")
    return float(batch.opened_at_G[0])


def _set_clock(shift: Path, seconds: float) -> None:
    with shift.open("r+b" if shift.exists() else "wb") as file:
        file.write(struct.pack("d", seconds))
