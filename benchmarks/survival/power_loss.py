"""The machine of a shard loses power again and again: what the shard had not synced is forgotten."""

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import POOL, POOL_NODE, SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from rig.power_loss.lost_power import lose_power, preload, run_until_killed, survivors
from rig.preloads import SYNCED_ONLY, build
from stepwell.errors import PoolUnavailable

AGENTS = 4
ROUNDS = 50
BETWEEN = 0.2, 1.2
"""Seconds of load between a recovery and the next loss, at least and at most."""
BACK_TIMEOUT = 60.0
NORMAL_STEPS = 500
"""Acknowledged with `--sync normal`, to show that the library does forget."""


class PowerLoss:
    name = "power_loss"
    fault = "a shard is killed and unsynced writes are forgotten, 50 rounds, --sync full"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with tempfile.TemporaryDirectory(prefix="power-loss-") as name:
            folder = Path(name)
            library = build(SYNCED_ONLY, folder)
            normal = await asyncio.to_thread(_forgotten_with_normal, library, folder / "normal")
            environment = preload(library, folder / "live", folder / "synced")
            node: Mapping[str, Any] = {**POOL_NODE, "env_vars": environment}
            async with survival_cluster(nodes=(node,), journal=folder / "live", sync="full") as cluster:
                load = AgentLoad(cluster.urls, auditor)
                working = asyncio.create_task(load.run(AGENTS))
                training = asyncio.create_task(auditor.follow(cluster.pool))
                rounds = 2 if quick else ROUNDS
                back = [await _lose_power(cluster, folder / "synced") for _ in range(rounds)]
                load.stopped.set()
                await working
                await auditor.drain(cluster.pool)
                await training
        measured = {"rounds": len(back), "slowest_back_s": round(max(back), 1), "normal_lost_percent": normal}
        return RowOutcome(auditor.figures() | measured, NOTHING_LOST, {"answered_percent": 100.0})


async def _lose_power(cluster: SurvivalCluster, synced: Path) -> float:
    """Seconds until the shard answers again."""
    await asyncio.sleep(random.uniform(*BETWEEN))
    lost = lose_power(cluster.shard_pid(POOL), synced)
    began = time.monotonic()
    async with asyncio.timeout(BACK_TIMEOUT):
        while True:
            try:
                await cluster.pool.check()
            except PoolUnavailable:
                await asyncio.sleep(0.1)
                continue
            if not lost.exists():
                return time.monotonic() - began
            await asyncio.sleep(0.1)


def _forgotten_with_normal(library: Path, folder: Path) -> float:
    """Percent of the acknowledged steps that `--sync normal` loses at one loss of power."""
    folder.mkdir()
    done = run_until_killed(library, folder, "normal", NORMAL_STEPS)
    journal = folder / "synced" / "data_pool.sqlite"
    kept = len(done & survivors(journal)) if journal.exists() else 0
    return round(100 * (1 - kept / len(done)), 1)
