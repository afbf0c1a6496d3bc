"""What a small operation costs: CPU of the processes that ask, of the link that they share, and of the shard.

A few processes, as the workers of a gateway, ask at a rate that does not depend on the answers. The CPU that the same
processes take in the same time without a call is subtracted.

- `operation`: they register, look up and complete trajectories, a third each. Somebody waits for every answer.
- `call`: what LLM calls bring. Each is announced and ended, for which nobody waits. After ten calls the rollout is
  completed, and for each new one a trajectory is registered and looked up.
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
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from stepwell.pool.actors import start_pool

from benchmarks.gateway_rig.processes import cpu_seconds
from rig.actors import pid_of
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.producing import CallBegun, Registration
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink, SharedLink

WORKERS = 4
RATES = (50, 500, 2_000)
"""Operations a second, of all workers together."""
SECONDS = 8.0
ROUNDS = 3
CALLS = 10
"""Of a rollout."""
CALL_SECONDS = 0.2
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
        _round(workers, pids, "operation", RATES[0], 1.0)  # warms up
        for kind in KINDS:
            for rate in RATES:
                costs, waits = [], []
                for _ in range(ROUNDS):
                    idle, _ = _round(workers, pids, kind, 0, SECONDS / 2)
                    busy, latencies = _round(workers, pids, kind, rate, SECONDS)
                    costs.append((busy / SECONDS - idle / (SECONDS / 2)) / (rate * OPERATIONS[kind]) * 1e3)
                    waits.append(statistics.median(latencies))
                figures[f"{kind}_cpu_ms_at_{rate}"] = round(statistics.median(costs), 3)
                figures[f"{kind}_ms_at_{rate}"] = round(statistics.median(waits) * 1e3, 2)
                print(f"    {kind}s {rate:>5}/s: {costs} ms of CPU an operation", flush=True)
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
    workers: Sequence["subprocess.Popen[str]"], pids: Sequence[int], kind: str, rate: float, seconds: float
) -> tuple[float, list[float]]:
    """Seconds of CPU, and the latencies."""
    before = sum(map(cpu_seconds, pids))
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps({"kind": kind, "rate": rate / len(workers), "seconds": seconds}) + "\n")
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
        print(json.dumps(await KINDS[asked["kind"]](pool, uids, asked["rate"], asked["seconds"])), flush=True)


def _started(link: SharedLink) -> SharedLink:
    link.start()
    return link


async def _operations(pool: PoolClient, uids: "count[int]", rate: float, seconds: float) -> list[float]:
    waits: list[float] = []
    async with asyncio.TaskGroup() as asking:
        async for _ in _due(rate / 3, seconds):
            asking.create_task(_roll_out(pool, f"{os.getpid()}-{next(uids)}", waits))
    return waits


async def _calls(pool: PoolClient, uids: "count[int]", rate: float, seconds: float) -> list[float]:
    waits: list[float] = []
    async with asyncio.TaskGroup() as asking:
        async for _ in _due(rate / CALLS, seconds):
            asking.create_task(_roll_out(pool, f"{os.getpid()}-{next(uids)}", waits, CALLS, CALL_SECONDS))
    return waits


KINDS = {"operation": _operations, "call": _calls}
OPERATIONS = {"operation": 1.0, "call": 2 + 3 / CALLS}
"""That each of them has."""


async def _due(rate: float, seconds: float) -> AsyncIterator[None]:
    began, begun = time.perf_counter(), 0
    while (now := time.perf_counter() - began) < seconds:
        while begun < now * rate:
            begun += 1
            yield
        await asyncio.sleep(TICK)


async def _roll_out(pool: PoolClient, uid: str, waits: list[float], calls: int = 0, interval: float = 0.0) -> None:
    async def timed(asking: Awaitable[object]) -> None:
        began = time.perf_counter()
        await asking
        waits.append(time.perf_counter() - began)

    await timed(pool.register_trajectory(Registration(uid, uid)))
    await timed(pool.channel_if_open(uid, uid))
    for number in range(calls):
        call = f"{uid}-{number}"
        await pool.begin_call(CallBegun(uid, uid, call))
        await asyncio.sleep(interval)
        await pool.end_call(uid, uid, call, is_lost=False)
    await timed(pool.complete_trajectory(uid, uid, 1.0))


if __name__ == "__main__":
    import uvloop

    uvloop.run(work(sys.argv[1]))
