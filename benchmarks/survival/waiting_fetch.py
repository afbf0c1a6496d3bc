"""What one fetch costs that waits on many shards while data arrives: calls to shards per second.

Each arrival is a rollout that makes its group ready, which is the dearest case: an unfinished group costs nothing. The
fetch wants more than will come, so it waits all the time.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.survival.cluster import POOL, survival_cluster
from benchmarks.survival.row import RowOutcome
from rig.builders import make_step
from stepwell.errors import FetchTimeout
from stepwell.pool.api.producing import Registration
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import RayLink

SHARDS, RATE = 16, 40.0
SECONDS = 20.0
MORE_THAN_COMES = 10**6
MOST_CALLS = 50.0
"""Per second."""


class CountingLink(RayLink):
    def __init__(self, address: str) -> None:
        super().__init__(address, "default")
        self.calls: Counter[str] = Counter()

    async def call(self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls[method] += 1
        return await super().call(actor, method, args, kwargs)


class WaitingFetch:
    name = "waiting_fetch"
    fault = "a fetch waits on 16 shards while 40 groups a second arrive"

    async def run(self, *, quick: bool) -> RowOutcome:
        shards, seconds = (2, 3.0) if quick else (SHARDS, SECONDS)
        async with survival_cluster(gateways=0, shards=shards) as cluster:
            link = CountingLink(cluster.nodes.address)
            await asyncio.to_thread(link.start)
            try:
                figures = await self._measure(link, cluster.pool, seconds)
            finally:
                await link.close()
        return RowOutcome(figures, {"calls_per_s": MOST_CALLS}, {"arrivals_per_s": 0.95 * RATE})

    async def _measure(self, link: CountingLink, producer: PoolClient, seconds: float) -> dict[str, float]:
        consumer = PoolClient(POOL, transport=link)
        await consumer.stats()
        link.calls.clear()
        began = time.monotonic()
        producing = asyncio.create_task(produce(producer, seconds))
        try:
            await consumer.fetch_batch(MORE_THAN_COMES, timeout=seconds, lease=60.0)
        except FetchTimeout:
            calls = sum(link.calls[method] for method in ("wait_news", "peek", "take"))
        waited = time.monotonic() - began
        return {
            "arrivals_per_s": round(await producing / seconds, 1),
            "calls_per_s": round(calls / waited, 1),
        }


async def produce(client: PoolClient, seconds: float) -> int:
    """Rollouts, each in time even if others take long. Returns how many."""
    began, sent = time.monotonic(), 0
    async with asyncio.TaskGroup() as sending:
        while (elapsed := time.monotonic() - began) < seconds:
            await asyncio.sleep(max(0.0, sent / RATE - elapsed))
            sent += 1
            sending.create_task(_send(client, sent))
    return sent


async def _send(client: PoolClient, number: int) -> None:
    await client.register_trajectory(Registration(f"t{number}", f"p{number}"))
    await client.submit_steps([make_step(f"t{number}", f"p{number}", step_index=0, is_last=True)])
