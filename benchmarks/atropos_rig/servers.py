"""The two servers: our server before a DataPool on Ray, and atroposlib's own, as it is published."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from stepwell.pool.actors import start_pool

from benchmarks.atropos_rig.clients import JSON, Client
from benchmarks.atropos_rig.processes import cpu_ms, memory_bytes
from benchmarks.gateway_rig.processes import Server, serving
from rig.atropos import atropos_python
from stepwell.pool.api.plan import Limits, PoolPlan

POOL = "data_pool"
BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Subject:
    """A server, and the processes that it is made of."""

    name: str
    server: Server
    pids: tuple[int, ...]

    @property
    def port(self) -> int:
        return self.server.port

    def begin(self, *, group_size: int) -> int:
        """Empty, with a trainer that has asked once and one environment, whose id is given."""
        client = Client(self.port)
        client.ask("GET", "/reset_data")
        trainer = {"wandb_group": "none", "wandb_project": "none", "batch_size": BATCH_SIZE, "max_token_len": 4096}
        steps = {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1_000_000}
        client.json("POST", "/register", trainer | steps)
        assert client.json("GET", "/batch")["batch"] is None
        env = {"max_token_length": 4096, "desired_name": "benchmark", "weight": 1.0, "group_size": group_size}
        env_id: int = client.json("POST", "/register-env", env)["env_id"]
        return env_id

    def batch(self, accept: str = JSON) -> bytes:
        return Client(self.port).ask("GET", "/batch", accept=accept)

    def queued(self) -> int:
        queued: int = Client(self.port).json("GET", "/status")["queue_size"]
        return queued

    def cpu_ms(self) -> float:
        return cpu_ms(self.pids)

    def memory_bytes(self) -> int:
        return memory_bytes(self.pids)


@contextmanager
def their_server(folder: Path) -> Iterator[Subject]:
    run_api = atropos_python().with_name("run-api")
    command = [str(run_api), "--host", "127.0.0.1", "--port", "{port}"]
    with serving(command, folder / "atropos.log", ready="/info") as server:
        yield Subject("atroposlib", server, (server.pid,))


@contextmanager
def our_server(folder: Path, address: str, namespace: str) -> Iterator[Subject]:
    """Ray runs already, at that address, and this process has joined it."""
    start_pool(PoolPlan(name=POOL, limits=Limits(max_queue_size=100_000)), namespace)
    flags = {
        "--data-pool-name": POOL,
        "--ray-address": address,
        "--ray-namespace": namespace,
        "--host": "127.0.0.1",
        "--port": "{port}",
    }
    command = [sys.executable, "-m", "stepwell", "atropos", *(word for flag in flags.items() for word in flag)]
    with serving(command, folder / "atropos.log", ready="/ready") as server:
        yield Subject("stepwell", server, (server.pid, pid_of_pool(namespace)))


def pid_of_pool(namespace: str) -> int:
    def pid(_: object) -> int:
        return os.getpid()

    shard: Any = ray.get_actor(POOL, namespace)
    found: int = ray.get(shard.__ray_call__.remote(pid))
    return found
