"""Hostile requests to every HTTP surface, as real processes with a pool that has a journal."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.survival.cluster import POOL, SurvivalCluster, survival_cluster
from benchmarks.survival.row import RowOutcome
from rig.atropos.server import atropos_process
from rig.gateways import GatewayProcess, served_process
from rig.hostile.attack import HostileSurface
from rig.hostile.surfaces import NO_REWARDS, atropos_surface, dashboard_surface, gateway_surface

REQUESTS = {"gateway": 50_000, "atropos": 30_000, "dashboard": 20_000}
QUICK = 50
"""So many times fewer in the short form."""
CONTROL = "control-key-of-the-benchmark"
NO_TOKENIZER = {"/ready": (503,), **NO_REWARDS}
FAULTS = ("unmeant_5xx", "hangs", "lost_connections", "unexplained", "cut_streams")


class HostileRequests:
    name = "hostile"
    fault = "100,000 hostile requests to gateway, Atropos server and dashboard"

    async def run(self, *, quick: bool) -> RowOutcome:
        found: Counter[str] = Counter()
        async with (
            survival_cluster(shards=2, gateway_flags={"control_keys": CONTROL}) as cluster,
            _surfaces(cluster) as (surfaces, processes),
        ):
            before = sum(_megabytes(process) for process in processes)
            counts = [REQUESTS[surface.name] // (QUICK if quick else 1) for surface in surfaces]
            reports = await asyncio.gather(
                *(surface.attack(count) for surface, count in zip(surfaces, counts, strict=True))
            )
            for surface, report in zip(surfaces, reports, strict=True):
                found.update(report.faults)
                print(f"{surface.name}: {dict(report.statuses)}, {report.broken} no HTTP", *report.examples, sep="\n  ")
            ended = sum(process.process.poll() is not None for process in processes)
            grown = sum(_megabytes(process) for process in processes) - before
            served = min(await asyncio.gather(*(_is_served(surface) for surface in surfaces)))
        figures = {
            "requests": sum(counts),
            "successes_percent": round(100 * sum(report.answered for report in reports) / sum(counts), 1),
            **{fault: found[fault] for fault in FAULTS},
            "processes_ended": ended,
            "slowest_s": round(max(report.slowest for report in reports), 2),
            "grown_mb": round(grown),
            "served_afterwards": served,
        }
        most = {**dict.fromkeys(FAULTS, 0), "processes_ended": 0}
        return RowOutcome(figures, most, {"successes_percent": 20.0, "served_afterwards": 1})


@asynccontextmanager
async def _surfaces(cluster: SurvivalCluster) -> AsyncIterator[tuple[list[HostileSurface], list[GatewayProcess]]]:
    joined: dict[str, Any] = {"ray_address": cluster.nodes.address, "control_keys": CONTROL, "data_pool_name": POOL}
    async with AsyncExitStack() as stack:
        atropos = stack.enter_context(atropos_process(cluster.folder / "atropos.log", **joined))
        dashboard = stack.enter_context(
            served_process("stepwell", "dashboard", flags=joined, log=cluster.folder / "dashboard.log")
        )
        surfaces = [
            await gateway_surface(cluster.urls[0], CONTROL, NO_TOKENIZER),
            atropos_surface(atropos.url, CONTROL),
            dashboard_surface(dashboard.url, CONTROL),
        ]
        yield surfaces, [*cluster.gateways, atropos, dashboard]


async def _is_served(surface: HostileSurface) -> bool:
    """Whether an ordinary request succeeds."""
    report = await surface.attack(100, seed=1, connections=1)
    return not report.faults and report.answered > 0


def _megabytes(process: GatewayProcess) -> float:
    pages = int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6
