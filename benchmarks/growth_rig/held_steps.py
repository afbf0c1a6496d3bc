"""What a shard costs that holds 100 to 1,000,000 steps.

The real ShardService in a process of its own for each size, without Ray, once in memory and once with a journal in
SQLite (`--sync normal`, so that the disk's time is not measured). Each holds groups of 8 trajectories of 2 steps. A
round sends groups and fetches as many, so the size stays. The processes are measured in turns, so that other load on
the machine affects all alike.
"""

import asyncio
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from stepwell.pool.shard.journal_store import JournalIdentity
from stepwell.pool.slices.producing import AddGroups

from benchmarks.gateway_rig.processes import memory_bytes
from benchmarks.growth_rig.curve import Curve, Shape
from benchmarks.pool_rules import GROUP, STEPS, make_step
from rig.asked import asked, trained
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.api.plan import JournalSync, Limits, PoolPlan
from stepwell.pool.api.producing import TRAIN, Registration
from stepwell.pool.shard.journal import ShardJournal
from stepwell.pool.shard.placement import journal_backend
from stepwell.pool.shard.service import GC_THRESHOLD, ShardService
from stepwell.steps.columns import Columns, pack
from stepwell.steps.step import Step

AXIS = "held_steps"
SIZES, QUICK_SIZES = (100, 1_000, 10_000, 100_000, 1_000_000), (100, 1_000)
ROUNDS, QUICK_ROUNDS = 7, 1
GROUPS_PER_ROUND = 60
A_FILL = 32
"""Groups in a message while the shard is filled."""
SEEN_IN_MEMORY = 10_000
"""Fewer steps are lost in what a process takes anyway."""
NAME = "data_pool"
MEMORY, JOURNAL = "memory", "journal"
IN_MEMORY, WITH_JOURNAL = "in memory", "with a journal"

PACKED = "Above 1,024 complete trajectories, all others are packed: one step upwards, flat before and after."
CURVES = (
    *(
        Curve(
            axis=AXIS,
            name=f"{kind}_ingest_cpu_us",
            unit=f"µs CPU a step, {where}",
            shape=Shape.FLAT,
            since=1_000,
            reason=f"A step is looked up in hash tables{also}; no call walks over what is held. {PACKED}",
        )
        for kind, where, also in (
            (MEMORY, IN_MEMORY, ""),
            (JOURNAL, WITH_JOURNAL, ", and is a row that is appended to a B-tree"),
        )
    ),
    *(
        Curve(
            axis=AXIS,
            name=f"{kind}_fetch_ms",
            unit=f"ms to fetch a group, {where}",
            shape=Shape.FLAT,
            since=1_000,
            reason=f"The ready groups are kept in the order in which they leave: the first is taken. {PACKED}",
        )
        for kind, where in ((MEMORY, IN_MEMORY), (JOURNAL, WITH_JOURNAL))
    ),
    Curve(
        axis=AXIS,
        name="memory_stats_ms",
        unit="ms for stats()",
        shape=Shape.FLAT,
        since=1_000,
        reason="Counters are kept up to date with every change, not counted when they are asked for.",
    ),
    Curve(
        axis=AXIS,
        name="memory_resident_mb",
        unit="MB resident for them",
        shape=Shape.LINEAR,
        reason="Each step is held once, with the tokens that it adds.",
    ),
    Curve(
        axis=AXIS,
        name="journal_disk_mb",
        unit="MB of journal",
        shape=Shape.LINEAR,
        reason="The journal mirrors what is held; it is no log that grows with time.",
    ),
    Curve(
        axis=AXIS,
        name="journal_restart_cpu_s",
        unit="s CPU to restore the shard",
        shape=Shape.LINEAR,
        reason="A restart reads each row once, and packs what is complete.",
    ),
    Curve(
        axis=AXIS,
        name="journal_restart_s",
        unit="s to restore the shard, by the clock",
        shape=Shape.LINEAR,
        reason="The same; it has the time in which others use the core, too.",
    ),
)


class HeldShard:
    """A shard that holds so many steps."""

    def __init__(self, folder: str | None) -> None:
        self._numbers = count()
        self._folder = folder
        self._plan = PoolPlan(
            name=NAME, uid="growth", journal=folder, limits=Limits(max_queue_size=10**9, max_bytes=10**12)
        )
        self._start()

    def _start(self) -> None:
        self._journal = None if self._folder is None else self._open_journal(self._folder)
        self._service = ShardService(self._plan, NAME, journal=self._journal)

    def _open_journal(self, folder: str) -> ShardJournal:
        identity = JournalIdentity(pool=NAME, pool_uid=self._plan.uid, shards=1, index=0)
        return journal_backend(folder).open(
            folder, NAME, identity, closed_kept=self._plan.limits.closed_kept, sync=JournalSync.NORMAL
        )

    async def fill(self, steps: int) -> None:
        groups = steps // (GROUP * STEPS)
        for start in range(0, groups, A_FILL):
            await asked(self._service, AddGroups(*self._message(min(A_FILL, groups - start))))

    async def one_round(self) -> dict[str, float]:
        messages = [self._message(1) for _ in range(GROUPS_PER_ROUND)]
        cpu = time.process_time()
        for message in messages:
            await asked(self._service, AddGroups(*message))
        cpu = time.process_time() - cpu
        fetches = [await self.fetch() for _ in messages]
        began = time.perf_counter()
        await self._service.stats()
        return {
            "ingest_cpu_us": cpu / (GROUPS_PER_ROUND * GROUP * STEPS) * 1e6,
            "fetch_ms": statistics.median(fetches) * 1e3,
            "stats_ms": (time.perf_counter() - began) * 1e3,
        }

    async def fetch(self) -> float:
        began = time.perf_counter()
        groups = await trained(self._service, BatchRequest(count=1, channel=TRAIN))
        took = time.perf_counter() - began
        assert len(groups.columns) == GROUP * STEPS
        return took

    def restart(self) -> dict[str, float]:
        assert self._journal is not None
        held = self._service.pool.stats().channels[TRAIN].held
        self._journal.close()
        del self._service
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        self._start()
        took = {"restart_cpu_s": time.process_time() - cpu, "restart_s": time.perf_counter() - began}
        assert self._service.pool.stats().channels[TRAIN].held == held
        return took

    def disk_bytes(self) -> int:
        return sum(file.stat().st_size for file in Path(str(self._folder)).iterdir())

    def _message(self, groups: int) -> tuple[Columns, list[Registration]]:
        steps: list[Step] = []
        registrations: list[Registration] = []
        for _ in range(groups):
            prompt_uid = f"p{next(self._numbers):x}"
            for number in range(GROUP):
                trajectory_uid = f"{prompt_uid}-{number}"
                registrations.append(Registration(trajectory_uid, prompt_uid, TRAIN, GROUP))
                made = [make_step(trajectory_uid, prompt_uid, index) for index in range(STEPS)]
                made[-1].response_ids[0] = number  # no two rollouts of a group are the same
                steps += [*made[:-1], replace(made[-1], is_last=True, reward=1.0)]
        return pack(steps), registrations


def serve(steps: int, folder: str | None, asked: Connection) -> None:
    """Hold so many steps, and answer each question: a round as long as it is True, the end then."""
    asyncio.run(_serve(steps, folder, asked))


async def _serve(steps: int, folder: str | None, asked: Connection) -> None:
    gc.set_threshold(*GC_THRESHOLD)
    shard = HeldShard(folder)
    await shard.fill(A_FILL * GROUP * STEPS)  # what the first messages bring stays, whatever is held
    for _ in range(A_FILL):
        await shard.fetch()
    before = memory_bytes(os.getpid())
    await shard.fill(steps)
    gc.collect()
    held = {"resident_mb": (memory_bytes(os.getpid()) - before) / 1e6}
    while asked.recv():
        asked.send(await shard.one_round())
    if folder is not None:
        held |= {"disk_mb": shard.disk_bytes() / 1e6, **shard.restart()}
    asked.send(held)


def measure(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    sizes, rounds = (QUICK_SIZES, QUICK_ROUNDS) if quick else (SIZES, ROUNDS)
    for kind in (MEMORY, JOURNAL):
        with tempfile.TemporaryDirectory(prefix="growth-") as folder:
            figures |= _measure_kind(kind, sizes, rounds, Path(folder))
    return figures


def _measure_kind(kind: str, sizes: Sequence[int], rounds: int, folder: Path) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    figures: dict[str, float] = {}
    with ExitStack() as ends:
        workers: dict[int, Connection] = {}
        for size in sizes:
            home = folder / str(size)
            home.mkdir()
            workers[size], theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(size, str(home) if kind == JOURNAL else None, theirs))
            process.start()
            theirs.close()  # so that the end of the process is seen here
            ends.callback(process.kill)
        print(f"{AXIS}: filling shards ({kind}) with {', '.join(f'{size:,}' for size in sizes)} steps", flush=True)
        told: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
        for number in range(rounds + 1):
            for size, worker in workers.items():
                worker.send(True)
                told[size].append(worker.recv())
            shown = ", ".join(f"{round_[-1]['ingest_cpu_us']:.0f}" for round_ in told.values())
            print(f"{AXIS}: {kind} {number}/{rounds}: {shown} µs a step", flush=True)
        for size, worker in workers.items():
            for name in told[size][0]:
                median = statistics.median(round_[name] for round_ in told[size][1:])  # the first warms up
                figures[f"{AXIS}_{kind}_{name}_at_{size}"] = median
            worker.send(False)
            for name, value in worker.recv().items():
                if name.startswith("restart") or size >= SEEN_IN_MEMORY:
                    figures[f"{AXIS}_{kind}_{name}_at_{size}"] = value
    return figures
