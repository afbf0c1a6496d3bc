"""What a small operation costs: CPU of the processes that ask, of the link that they share, and of the shard.

A few processes, as the workers of a gateway, register, look up and complete trajectories, a third each, at a rate that
does not depend on the answers. The CPU that the same processes take in the same time without a call is subtracted.
"""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.gateway_rig.processes import cpu_seconds
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink, SharedLink
from stepwell.pool.shard.actor import start_pool
from tests.rig.actors import pid_of

WORKERS = 4
RATES = (50, 500, 2_000)
"""Operations a second, of all workers together."""
SECONDS = 8.0
ROUNDS = 3
TICK = 0.004
"""Seconds between two looks whether operations are due."""
NAMESPACE = "operations"
LIMITS = Limits(max_queue_size=1_000)


def measure_operations(address: str) -> dict[str, float]:
    """By rate: milliseconds of CPU an operation, and the median latency in milliseconds."""
    start_pool(PoolPlan(name="operations", limits=LIMITS), NAMESPACE)
    shard = pid_of("operations", NAMESPACE)
    figures: dict[str, float] = {}
    with shared_link(address) as (path, link), _workers(path) as workers:
        pids = [shard, link, *(worker.pid for worker in workers)]
        _round(workers, pids, RATES[0], 1.0)  # warms up
        for rate in RATES:
            costs, waits = [], []
            for _ in range(ROUNDS):
                idle, _ = _round(workers, pids, 0, SECONDS / 2)
                busy, latencies = _round(workers, pids, rate, SECONDS)
                costs.append((busy / SECONDS - idle / (SECONDS / 2)) / rate * 1e3)
                waits.append(statistics.median(latencies))
            figures[f"operation_cpu_ms_at_{rate}"] = round(statistics.median(costs), 3)
            figures[f"operation_ms_at_{rate}"] = round(statistics.median(waits) * 1e3, 2)
            print(f"    operations {rate:>5}/s: {costs} ms of CPU each", flush=True)
    return figures


@contextmanager
def shared_link(address: str) -> Iterator[tuple[str, int]]:
    """The socket of a link process, and its pid."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = str(Path(folder) / "link")
        listener.bind(path)
        listener.listen()
        link = RayLink(address, NAMESPACE, listener=listener)
        link.start()
        assert link.process is not None
        try:
            yield path, link.process.pid
        finally:
            asyncio.run(link.close())


@contextmanager
def _workers(path: str) -> Iterator[Sequence["subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "benchmarks.pool_operations", path]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _round(
    workers: Sequence["subprocess.Popen[str]"], pids: Sequence[int], rate: float, seconds: float
) -> tuple[float, list[float]]:
    """Seconds of CPU, and the latencies."""
    before = sum(map(cpu_seconds, pids))
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps({"rate": rate / len(workers), "seconds": seconds}) + "\n")
        worker.stdin.flush()
    told: list[Any] = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
    return sum(map(cpu_seconds, pids)) - before, [wait for waits in told for wait in waits]


async def work(path: str) -> None:
    """A worker: rounds as they are asked for on standard input."""
    pool = PoolClient("operations", NAMESPACE, transport=_started(SharedLink(path)))
    uids = count()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        print(json.dumps(await _ask_for(pool, uids, asked["rate"], asked["seconds"])), flush=True)


def _started(link: SharedLink) -> SharedLink:
    link.start()
    return link


async def _ask_for(pool: PoolClient, uids: "count[int]", rate: float, seconds: float) -> list[float]:
    waits: list[float] = []
    began, sent = time.perf_counter(), 0
    async with asyncio.TaskGroup() as asking:
        while (now := time.perf_counter() - began) < seconds:
            while sent < now * rate / 3:
                sent += 1
                asking.create_task(_roll_out(pool, f"{os.getpid()}-{next(uids)}", waits))
            await asyncio.sleep(TICK)
    return waits


async def _roll_out(pool: PoolClient, uid: str, waits: list[float]) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        partial(pool.register_trajectory, Registration(uid, uid)),
        partial(pool.knows, uid, uid),
        partial(pool.complete_trajectory, uid, uid, 1.0),
    ]
    for call in calls:
        began = time.perf_counter()
        await call()
        waits.append(time.perf_counter() - began)


if __name__ == "__main__":
    import uvloop

    uvloop.run(work(sys.argv[1]))
