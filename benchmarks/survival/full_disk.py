"""A small disk that fills up under load, and is freed: that of the journal, of a gateway's spool, of the archive.

It is mounted by this program, which needs the right to do so: run it as root, or below
`unshare --user --map-root-user --mount`.
"""

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.survival.auditor import NOTHING_LOST, Auditor
from benchmarks.survival.cluster import SurvivalCluster, survival_cluster
from benchmarks.survival.load import AgentLoad
from benchmarks.survival.row import RowOutcome
from benchmarks.survival.stopped_shard import stopped
from stepwell.errors import PoolUnavailable

AGENTS = 8
BEFORE = 3.0
"""Seconds of load before the fault."""
FULL = 8.0
"""Seconds for which the disk stays full after the first failure."""
NOTICED, HEALED = 60.0, 60.0
"""Seconds that a failure, and its end, are waited for."""
GOAL = 10.0
DISK_MB = 64
PENDING, DELIVERED = "stepwell_spool_pending_steps", "stepwell_delivered_steps_total"
PAUSE = 0.1

Condition = Callable[[], Awaitable[bool]]


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """To the last byte."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**12))

    def free(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(megabytes: int = DISK_MB) -> Iterator[SmallDisk]:
    with tempfile.TemporaryDirectory(prefix="small-disk-") as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, text=True
        )
        if mounted.returncode:
            raise PermissionError(f"{mounted.stderr.strip()}; run this as root, or below: unshare -r --mount")
        try:
            yield SmallDisk(Path(folder))
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@asynccontextmanager
async def working(auditor: Auditor, cluster: SurvivalCluster, agents: int, **load: Any) -> AsyncIterator[AgentLoad]:
    """Agents and a trainer, until the block ends; then everything is delivered."""
    agents_load = AgentLoad(cluster.urls, auditor, **load)
    tasks = [asyncio.create_task(agents_load.run(agents)), asyncio.create_task(auditor.follow(cluster.pool))]
    await asyncio.sleep(BEFORE)
    yield agents_load
    agents_load.stopped.set()
    await tasks[0]
    await auditor.drain(cluster.pool)
    await tasks[1]


async def seconds_until(condition: Condition, timeout: float) -> float:
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > timeout:
            return float("inf")
        await asyncio.sleep(PAUSE)
    return time.monotonic() - began


async def fill_and_free(disk: SmallDisk, fails: Condition, works: Condition, full: float) -> dict[str, float]:
    await asyncio.to_thread(disk.fill)
    noticed = await seconds_until(fails, NOTICED)
    await asyncio.sleep(full)
    disk.free()
    healed = await seconds_until(works, HEALED)
    return {"noticed_s": round(noticed, 1), "healed_s": round(healed, 1)}


class FullJournalDisk:
    name = "disk_full_journal"
    fault = "the journal's disk is full for 8 s"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with small_disk() as disk:
            async with (
                survival_cluster(journal=disk.folder / "journal", min_free_bytes=0) as cluster,
                working(auditor, cluster, 2 if quick else AGENTS),
            ):
                delivered = 0.0

                async def fails() -> bool:
                    nonlocal delivered
                    delivered = await cluster.reading(DELIVERED)
                    return not await _takes_data(cluster)

                async def works() -> bool:
                    return await _takes_data(cluster) and await cluster.reading(DELIVERED) > delivered

                measured = await fill_and_free(disk, fails, works, 2.0 if quick else FULL)
        most = {**NOTHING_LOST, "noticed_s": NOTICED, "healed_s": GOAL}
        return RowOutcome(auditor.figures() | measured, most, {"answered_percent": 100.0})


async def _takes_data(cluster: SurvivalCluster) -> bool:
    try:
        await cluster.pool.check()
    except PoolUnavailable:
        return False
    return True


class FullSpoolDisk:
    """While it is full, the pool does not answer, so that steps have to wait. Then the gateway is killed, before the
    pool answers again: what agents were answered is in the spool."""

    name = "disk_full_spool"
    fault = "the disk of a gateway's spool is full for 8 s while the pool is away; then the gateway is killed"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with small_disk() as disk:
            async with (
                survival_cluster(gateway_flags={"spool": disk.folder / "spool"}) as cluster,
                working(auditor, cluster, 2 if quick else AGENTS, most_calls=20) as load,
            ):

                async def fails() -> bool:
                    return await cluster.reading(PENDING) > 0

                async def works() -> bool:
                    return await cluster.reading(PENDING) == 0

                with stopped(cluster, "data_pool"):
                    measured = await fill_and_free(disk, fails, works, 2.0 if quick else FULL)
                    await self._let_agents_end(cluster, load)
                    waited = await cluster.reading("stepwell_waiting_steps")
                    cluster.gateways[0].kill()
                await asyncio.to_thread(cluster.fleet.start_again, 0)
        most = {**NOTHING_LOST, "noticed_s": NOTICED, "healed_s": GOAL}
        return RowOutcome(auditor.figures() | measured | {"steps_in_spool": waited}, most)

    async def _let_agents_end(self, cluster: SurvivalCluster, load: AgentLoad) -> None:
        """Until every agent waits for the completion of its rollout, which is not confirmed while the pool is away. A
        call that is answered in the milliseconds before a kill may be in memory only."""
        load.stopped.set()
        seen, since = 0.0, time.monotonic()
        while time.monotonic() - since < 1.0:
            recorded = await cluster.reading("stepwell_steps_total")
            if recorded != seen:
                seen, since = recorded, time.monotonic()
            await asyncio.sleep(PAUSE)


class FullArchiveDisk:
    name = "disk_full_archive"
    fault = "the archive's disk is full for 8 s"

    async def run(self, *, quick: bool) -> RowOutcome:
        auditor = Auditor()
        with small_disk(8) as disk:
            folder = disk.folder / "archive"
            async with survival_cluster(archive=folder) as cluster:
                async with working(auditor, cluster, AGENTS, pause=0.0, most_calls=1):
                    files = 0

                    async def fails() -> bool:
                        nonlocal files
                        archiving = (await cluster.pool.stats()).archiving
                        files = archiving.files
                        return archiving.failures > 0

                    async def works() -> bool:
                        return (await cluster.pool.stats()).archiving.files > files

                    measured = await fill_and_free(disk, fails, works, 1.0 if quick else FULL)
                archiving = (await cluster.pool.stats()).archiving
                archived = await asyncio.to_thread(_archived_trajectories, folder)
        measured |= {
            "archive_lost": len(auditor.completed) - len(archived) - archiving.waiting_groups,
            "archived_twice": sum(count - 1 for count in archived.values()),
            "archive_dropped": archiving.dropped_groups,
        }
        nothing = dict.fromkeys(("archive_lost", "archived_twice", "archive_dropped"), 0)
        most = {**NOTHING_LOST, **nothing, "noticed_s": NOTICED, "healed_s": GOAL}
        return RowOutcome(auditor.figures() | measured, most, {"answered_percent": 100.0})


def _archived_trajectories(folder: Path) -> Counter[str]:
    """In how many rows each is. A rollout of this row has one step."""
    import pyarrow.parquet

    files = [pyarrow.parquet.read_table(file, columns=["trajectory_uid"]) for file in folder.glob("*.parquet")]
    return Counter(uid for file in files for uid in file.column("trajectory_uid").to_pylist())
