"""What the next call of a trajectory costs that has 1 to 2,000 turns.

A real gateway with a fake engine, recording into a pool on Ray: a conversation that grows by some 70 tokens a turn,
sent whole with every call, as agents do. A size is measured over its last calls; for few turns, over several
trajectories. The shard's share is measured by itself, with such a rollout, in this process.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway_rig.ours import OurGateway, our_gateway
from benchmarks.gateway_rig.processes import exact_cpu_seconds, family, memory_bytes, serving
from benchmarks.gateway_rig.subjects import Door
from benchmarks.growth_rig.curve import Curve, Shape
from benchmarks.long_rollout import fetch_and_merge, filled, rollout
from rig.ray_cluster import RayCluster
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration
from stepwell.pool.rules.pool import Pool
from stepwell.steps.columns import pack

AXIS = "turns"
SIZES, QUICK_SIZES = (1, 10, 100, 500, 1_000, 2_000), (1, 10, 40)
WINDOW = 50
"""Calls over which a size is measured."""
ASKED = "and what is next"
MAX_TOKENS = 128
"""More than any reply has: it comes to its own end."""
TOKENS_A_TURN = 70
"""About so many, with the template's own."""
RESPONSE = 16
MAX_MODEL_LEN = 400_000
ROUNDS = 5

CURVES = (
    Curve(
        axis=AXIS,
        name="gateway_cpu_ms",
        unit="ms CPU of the gateway a call",
        shape=Shape.LINEAR,
        reason="The agent sends its whole history, and the engine reports the ids of the whole prompt.",
    ),
    Curve(
        axis=AXIS,
        name="latency_ms",
        unit="ms a call, with the fake engine",
        shape=Shape.LINEAR,
        reason="The same, and the engine reads the history too.",
    ),
    Curve(
        axis=AXIS,
        name="gateway_mb",
        unit="MB resident in the gateway",
        shape=Shape.FLAT,
        reason="Steps leave for the pool; the turns that it remembers share one array, as long as the conversation.",
    ),
    Curve(
        axis=AXIS,
        name="shard_us",
        unit="µs in the shard a step",
        shape=Shape.LINEAR,
        reason="The prompt is compared once with what is stored, and the new tokens are appended to it.",
    ),
    Curve(
        axis=AXIS,
        name="step_bytes",
        unit="bytes shipped a step",
        shape=Shape.FLAT,
        since=10,
        reason="A step is stored and shipped with the tokens that it adds: the prefix tree.",
    ),
    Curve(
        axis=AXIS,
        name="fetch_ms",
        unit="ms to fetch and merge the trajectory",
        shape=Shape.LINEAR,
        reason="It is one sequence of its final length.",
    ),
)


class Conversation:
    """One trajectory, which goes on call by call."""

    def __init__(self, http: aiohttp.ClientSession, url: str, door: Door) -> None:
        self._http, self._url, self._door = http, url, door
        self._messages: list[dict[str, Any]] = []
        self.turns = 0
        self.tokens = 0
        """Of the last prompt."""

    async def call(self) -> float:
        """Seconds."""
        self._messages.append({"role": "user", "content": ASKED})
        self.turns += 1
        body = {"model": "tiny", "messages": self._messages, "max_tokens": MAX_TOKENS}
        headers = {"Authorization": f"Bearer {self._door.key}"}
        began = time.perf_counter()
        async with self._http.post(self._url + self._door.path, json=body, headers=headers) as reply:
            told = await reply.json()
            assert reply.status == 200, told
        took = time.perf_counter() - began
        self._messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
        self.tokens = told["usage"]["prompt_tokens"]
        return took


class TurnsAtGateway:
    def __init__(self, ours: OurGateway, sizes: Sequence[int]) -> None:
        self._ours, self._sizes = ours, sizes
        self._calls = 0
        self.figures: dict[str, float] = {}

    async def run(self) -> None:
        shorts = [size for size in self._sizes if size < WINDOW]
        opened = 1 + sum(map(self._count, shorts))
        doors = iter(await asyncio.to_thread(self._ours.open, opened))
        async with aiohttp.ClientSession() as http:

            def begin() -> Conversation:
                return Conversation(http, self._ours.server.url, next(doors))

            long = begin()
            for _ in range(3):
                await self._say(long)  # warms up
            for size in self._sizes:
                talks = [begin() for _ in range(self._count(size))] if size in shorts else [long]
                await self._measure(size, talks)

    def _count(self, size: int) -> int:
        """How many trajectories of that many turns are measured."""
        return max(1, WINDOW // size)

    async def _say(self, talk: Conversation) -> float:
        self._calls += 1
        return await talk.call()

    async def _measure(self, size: int, talks: Sequence[Conversation]) -> None:
        window = min(size, WINDOW)
        for talk in talks:
            while talk.turns < size - window:
                await self._say(talk)
        await asyncio.to_thread(self._ours.settle, self._calls)
        before = exact_cpu_seconds(*family(self._ours.server.pid))
        times = [await self._say(talk) for talk in talks for _ in range(size - talk.turns)]
        await asyncio.to_thread(self._ours.settle, self._calls)
        used = exact_cpu_seconds(*family(self._ours.server.pid)) - before
        told = {
            "gateway_cpu_ms": used / len(times) * 1e3,
            "latency_ms": statistics.median(times) * 1e3,
            "gateway_mb": memory_bytes(self._ours.server.pid) / 1e6,
            "prompt_tokens": talks[-1].tokens,
        }
        print(f"{AXIS}: {size}: " + ", ".join(f"{name} {value:.4g}" for name, value in told.items()), flush=True)
        self.figures |= {f"{AXIS}_{name}_at_{size}": value for name, value in told.items()}


def measure(cluster: RayCluster, folder: Path, quick: bool) -> dict[str, float]:
    sizes = QUICK_SIZES if quick else SIZES
    engine = [sys.executable, "-m", "rig.fake_engine", "--port", "{port}", "--max-model-len", str(MAX_MODEL_LEN)]
    with (
        cluster.namespace() as namespace,
        serving(engine, folder / "fake_engine.log") as served,
        our_gateway(served, folder, cluster.address, namespace, prompt_length=MAX_MODEL_LEN) as ours,
    ):
        turns = TurnsAtGateway(ours, sizes)
        asyncio.run(turns.run())
    return turns.figures | measure_shard(sizes)


def measure_shard(sizes: Sequence[int]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for size in sizes:
        steps = rollout(size, size * TOKENS_A_TURN, RESPONSE)
        pool = filled(steps)
        merges = [fetch_and_merge(pool, whole_prompts=False) for _ in range(ROUNDS)]
        told = {
            "shard_us": statistics.median(_ingest_us(size) for _ in range(ROUNDS)),
            "step_bytes": merges[0][1] / size,
            "fetch_ms": statistics.median(seconds for seconds, _, _ in merges) * 1e3,
        }
        print(f"{AXIS}: {size}: " + ", ".join(f"{name} {value:.4g}" for name, value in told.items()), flush=True)
        figures |= {f"{AXIS}_{name}_at_{size}": value for name, value in told.items()}
    return figures


def _ingest_us(size: int) -> float:
    """Of the last steps of a rollout of so many."""
    pool = Pool(Limits())
    pool.ingest.register(Registration("t", "p", "train", 1))
    times = []
    for step in rollout(size, size * TOKENS_A_TURN, RESPONSE):
        message = pack([step])
        began = time.perf_counter()
        pool.ingest.submit(message)
        times.append(time.perf_counter() - began)
    return statistics.median(times[-WINDOW:]) * 1e6
