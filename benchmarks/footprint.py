"""Memory of the parts that grow with the load (docs/operations/scaling.md): a trajectory, a step, a call in flight.

Trajectories of five turns, each with 1,000 new prompt tokens and 500 response tokens, are held by a shard in a process
of its own, without Ray and journal. Calls in flight are held by a gateway process whose engine does not answer.

Counted is what is resident: anonymous memory and pages of files, which processes on one machine share; not Ray's shared
object store. `gateway_mb` is one process that serves agents, with a tokenizer of 150,000 tokens, after its first calls;
it does not import Ray. `link_mb` is the process that joins Ray for it, one for all workers of a machine. `bare_ray_mb`
is what Ray itself takes there: a process that only joined the same cluster and called one actor.

    python -m benchmarks.footprint
"""

import argparse
import asyncio
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from rig.ray_cluster import RayCluster, start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

import aiohttp
import httpx
import numpy as np
from stepwell.pool.slices.producing import AddSteps, Register

from benchmarks.report import report
from rig.asked import asked
from rig.fake_engine import FakeEngine
from rig.fake_engine.faults import Faults
from rig.gateways import GatewayProcess, free_port, gateway_process
from rig.large_tokenizer import write_large_tokenizer
from rig.waiting import until, wait_until
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client.link import RayLink
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import pack
from stepwell.steps.step import Step, logprobs_array

TURNS, PROMPT, RESPONSE = 5, 1_000, 500
COUNTED = 4 * PROMPT + 8 * RESPONSE
"""Bytes of tokens and log-probabilities that one step adds."""
TRAJECTORIES, CALLS = 4_000, 2_000
WORDS = "hello " * 1_000
"""The new text of a call."""
MOST_GATEWAY_MB = 120
BARE_RAY = """
import sys
import ray

ray.init(address=sys.argv[1], log_to_driver=False)


@ray.remote(num_cpus=0)
class Echo:
    def say(self, word):
        return word


print(ray.get(Echo.remote().say.remote("here")), flush=True)
sys.stdin.read()
"""
"""Ends with its stdin."""


def resident(pid: int | str = "self") -> int:
    """Bytes, without shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(size) << 10 for size in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB$", status, re.M))


async def hold(trajectories: int, turns: int) -> int:
    """The bytes that a shard grows by."""
    shard = ShardService(PoolPlan(), "data_pool")
    await _open(shard, 100, turns, "warm-up")
    before = resident()
    await _open(shard, trajectories, turns, "t")
    return resident() - before


async def _open(shard: ShardService, count: int, turns: int, name: str) -> None:
    numbers = np.random.default_rng(0)
    for n in range(count):
        uid = f"{name}-{n}-{numbers.integers(2**60):x}"
        await shard.run([Register(Registration(uid, uid))])
        context = np.empty(0, np.int32)
        for turn in range(turns):
            context = np.concatenate([context, numbers.integers(0, 150_000, PROMPT, dtype=np.int32)])
            response = numbers.integers(0, 150_000, RESPONSE, dtype=np.int32)
            logprobs = logprobs_array(-numbers.random(RESPONSE))
            step = Step(
                prompt_ids=context,
                response_ids=response,
                response_logprobs=logprobs,
                trajectory_uid=uid,
                prompt_uid=uid,
                uid=f"{uid}-{turn}",
            )
            await asked(shard, AddSteps(pack([step]), None, None))
            context = np.concatenate([context, response])


def held_by_shard(trajectories: int, turns: int) -> int:
    return asyncio.run(hold(trajectories, turns))


def alone(measure: Callable[[int, int], int], *args: int) -> int:
    """In a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *args).result()


async def measure_gateway(calls: int) -> dict[str, float]:
    """Its link to Ray waits for a cluster that is not there."""
    with tempfile.TemporaryDirectory() as folder:
        async with FakeEngine() as engine:
            engine.weight_version = "1"
            await asyncio.to_thread(write_large_tokenizer, Path(folder))
            nowhere = f"127.0.0.1:{free_port()}"
            gateway = gateway_process(
                Path(folder) / "log",
                ray_address=nowhere,
                data_pool_name="none",
                vllm_addresses=engine.url,
                tokenizer_path=folder,
            )
            pid, url, close = await asyncio.to_thread(_enter, gateway)
            try:
                return await _measure_calls(engine, pid, url, calls)
            finally:
                await asyncio.to_thread(close)


def _enter(gateway: AbstractContextManager[GatewayProcess]) -> tuple[int, str, Callable[[], None]]:
    stack = ExitStack()
    process = stack.enter_context(gateway)
    return process.process.pid, process.url, stack.close


async def _measure_calls(engine: FakeEngine, pid: int, url: str, calls: int) -> dict[str, float]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}]}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask() -> None:
            async with http.post(f"{url}/unrecorded/v1/chat/completions", json=body) as answer:
                await answer.read()

        for _ in range(20):
            await ask()
        await asyncio.to_thread(wait_until, lambda: not _lacks_tokenizer(url), "the tokenizer to be checked")
        before = resident(pid)
        engine.faults = Faults(delay_s=600.0)
        asking = [asyncio.create_task(ask()) for _ in range(calls)]
        await until(lambda: engine.in_flight == calls, f"{calls} calls in flight", 120.0)
        grown = resident(pid) - before
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return {"gateway_mb": round(before / 1e6), "call_in_flight_kb": round(grown / calls / 1e3, 1)}


def _lacks_tokenizer(url: str) -> bool:
    return "tokenizer" in httpx.get(f"{url}/ready").json()["missing"]


def measure_ray(cluster: RayCluster) -> dict[str, float]:
    """The link, and a process that does nothing but use Ray."""
    link = RayLink(cluster.address, "footprint")
    link.start()
    assert link.is_joined
    assert link.process is not None
    try:
        with subprocess.Popen(
            [sys.executable, "-c", BARE_RAY, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as bare:
            assert bare.stdout is not None
            assert bare.stdout.readline() == b"here\n"
            sizes = {"link_mb": resident(link.process.pid), "bare_ray_mb": resident(bare.pid)}
            bare.communicate()
    finally:
        asyncio.run(link.close())
    return {name: round(size / 1e6) for name, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=TRAJECTORIES)
    parser.add_argument("--calls", type=int, default=CALLS)
    given = parser.parse_args()
    opened, held = (alone(held_by_shard, given.trajectories, turns) / given.trajectories for turns in (0, TURNS))
    figures = {
        "trajectory_bytes": round(opened),
        "step_bytes": round((held - opened) / TURNS),
        "step_bytes_counted": COUNTED,
        **asyncio.run(measure_gateway(given.calls)),
    }
    with start_ray() as cluster:
        figures |= measure_ray(cluster)
    for name, value in figures.items():
        print(f"{name:20} {value:>10g}")
    report(figures, at_most={"step_bytes": 1.5 * COUNTED, "gateway_mb": MOST_GATEWAY_MB})


if __name__ == "__main__":
    main()
