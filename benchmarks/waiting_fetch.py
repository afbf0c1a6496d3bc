"""What one fetch costs that waits on many shards while data arrives: calls to shards per second.

Each arrival is a rollout that makes its group ready, which is the dearest case: an unfinished group costs nothing. The
fetch wants more than will come, so it waits all the time.

    python -m benchmarks.waiting_fetch --shards 16 --rate 40
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.rig.ray_cluster import start_ray  # isort: skip # sets Ray's environment, so it comes before Ray

from benchmarks.report import report
from stepwell.errors import FetchTimeout
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from stepwell.pool.client.ray_transport import RayTransport
from stepwell.pool.shard.actor import start_pool
from tests.builders import make_step

POOL, NAMESPACE = "waiting", "waiting"
MOST_CALLS = 50.0
"""Per second, with 16 shards and 40 arrivals per second."""


class CountingTransport(RayTransport):
    def __init__(self) -> None:
        super().__init__(NAMESPACE)
        self.calls: Counter[str] = Counter()

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls[method] += 1
        return await super().call(actor, method, args, kwargs)


async def produce(client: PoolClient, rate: float, seconds: float) -> int:
    """One rollout after the other, at that rate. Returns how many."""
    began, sent = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds:
        await asyncio.sleep(max(0.0, sent / rate - elapsed))
        sent += 1
        await client.register_trajectory(Registration(f"t{sent}", f"p{sent}"))
        await client.submit_steps([make_step(f"t{sent}", f"p{sent}", step_index=0, is_last=True)])
    return sent


async def measure(shards: int, rate: float, seconds: float) -> dict[str, float]:
    await asyncio.to_thread(start_pool, PoolPlan(name=POOL, shards=shards), NAMESPACE)
    transport = CountingTransport()
    consumer, producer = PoolClient(POOL, NAMESPACE, transport=transport), PoolClient(POOL, NAMESPACE)
    await asyncio.gather(consumer.stats(), producer.stats())
    transport.calls.clear()
    began = time.monotonic()
    producing = asyncio.create_task(produce(producer, rate, seconds))
    try:
        await consumer.fetch_batch(10**6, timeout=seconds, lease=60.0)
    except FetchTimeout:
        calls = transport.calls["watch_ready"] + transport.calls["take"]
    waited = time.monotonic() - began
    return {
        "shards": shards,
        "arrivals_per_s": round(await producing / waited, 1),
        "calls_per_s": round(calls / waited, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting_fetch")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with start_ray():
        figures = asyncio.run(measure(args.shards, args.rate, args.seconds))
    report(figures, at_most={"calls_per_s": MOST_CALLS})


if __name__ == "__main__":
    main()
