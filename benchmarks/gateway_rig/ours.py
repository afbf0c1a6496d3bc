"""Our gateway, the real command with a control key, recording into a DataPool on Ray.

A round's trajectories are opened before it and completed after it, outside the measured time; then a trainer fetches
them, and every call must be in the batch. So the pool holds one round's steps at most, and nothing is ever dropped.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from stepwell.pool.actors import start_pool

from benchmarks.gateway_rig import canned
from benchmarks.gateway_rig.processes import Server, cpu_seconds, serving
from benchmarks.gateway_rig.spoken import CHAT, SPOKEN
from benchmarks.gateway_rig.subjects import Door
from rig.tiny_model import make_tiny_model
from rig.waiting import wait_until
from stepwell.pool.api.plan import Limits, PoolPlan
from stepwell.pool.api.stats import StepCount
from stepwell.pool.client import DataPool, PoolClient

NAME = "stepwell"
POOL = "data_pool"
SETTLING = 120.0


class OurGateway:
    """Clients speak chat, unless another dialect is named."""

    def __init__(self, server: Server, pool: DataPool, pool_pid: int, key: str, dialect: str = CHAT) -> None:
        self.name = NAME if dialect == CHAT else f"{NAME}_{dialect}"
        self.dialect = dialect
        self.server, self.pool, self.key = server, pool, key
        self._pool_pid = pool_pid
        self._pool_cpu, self._calls = 0.0, 0
        self._bases: list[str] = []

    def speaking(self, dialect: str) -> "OurGateway":
        """The same gateway for clients of another dialect."""
        return OurGateway(self.server, self.pool, self._pool_pid, self.key, dialect)

    def open(self, clients: int) -> list[Door]:
        self._before, self._pool_cpu_before = self._accepted(), cpu_seconds(self._pool_pid)
        opened = [self.server.ask("/init_trajectory", {}, key=self.key) for _ in range(clients)]
        self._bases = [trajectory["base_url"].removeprefix(self.server.url) for trajectory in opened]
        return [
            Door(f"{base}/{SPOKEN[self.dialect].path}", trajectory["api_key"])
            for base, trajectory in zip(self._bases, opened, strict=True)
        ]

    def settle(self, calls: int) -> None:
        wait_until(lambda: self.new_steps().steps >= calls, f"{calls} steps in the pool", SETTLING)
        self._pool_cpu += cpu_seconds(self._pool_pid) - self._pool_cpu_before
        self._calls += calls

    def check(self, calls: int) -> None:
        """Fetch what was recorded, as a trainer would."""
        for base in self._bases:
            self.server.ask(f"{base}/complete_trajectory", {"reward": 1.0}, key=self.key)
        columns = self.pool.fetch_batch(len(self._bases)).columns
        assert len(columns) == calls, f"{calls} calls were answered, and {len(columns)} steps came out of the pool"
        assert set(columns.prompt_lengths_S) == {canned.PROMPT}
        assert set(columns.response_lengths_S) == {canned.RESPONSE}
        assert not columns.logprobs.max() > 0
        assert len(columns.logprobs) == calls * canned.RESPONSE

    def cpu(self) -> float:
        return cpu_seconds(self.server.pid)

    @property
    def pool_cpu_ms(self) -> float:
        """What a call cost the pool's actor, over all rounds so far."""
        return self._pool_cpu / self._calls * 1e3

    def new_steps(self) -> StepCount:
        """What the pool took since the doors were opened."""
        return self._accepted() - self._before

    def _accepted(self) -> StepCount:
        stats = self.pool.stats()
        assert not stats.quarantined, stats.quarantined
        return stats.channels["train"].accepted if "train" in stats.channels else StepCount()


@contextmanager
def our_gateway(
    engine: Server,
    folder: Path,
    address: str,
    namespace: str,
    *,
    prompt_length: int = 2 * canned.PROMPT,
    response_length: int = canned.RESPONSE,
    program: str = "stepwell.gateway",
) -> Iterator[OurGateway]:
    """Ray runs already, at that address, and this process has joined it."""
    start_pool(PoolPlan(name=POOL, limits=Limits(max_queue_size=100_000)), namespace)
    key = f"benchmark-{secrets.token_hex(16)}"
    flags = {
        "--data-pool-name": POOL,
        "--vllm-addresses": engine.url,
        "--tokenizer-path": str(make_tiny_model(folder / "tiny_model")),
        "--prompt-length": str(prompt_length),
        "--response-length": str(response_length),
        "--ray-address": address,
        "--ray-namespace": namespace,
        "--host": "127.0.0.1",
        "--port": "{port}",
    }
    command = [sys.executable, "-m", program, *(word for flag in flags.items() for word in flag)]
    env = {"STEPWELL_GATEWAY_CONTROL_KEYS": key}
    with serving(command, folder / "gateway.log", ready="/ready", env=env) as server:
        yield OurGateway(server, DataPool(PoolClient(POOL, namespace)), pid_of_shard(POOL, namespace), key)


def pid_of_shard(name: str, namespace: str) -> int:
    def pid(_: object) -> int:
        return os.getpid()

    shard: Any = ray.get_actor(name, namespace)
    found: int = ray.get(shard.__ray_call__.remote(pid))
    return found
