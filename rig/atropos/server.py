"""Atropos servers for tests: one in the test's own event loop, and the real command as a process that can be killed."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rig.gateways import LOOPBACK, GatewayProcess, served_process
from rig.waiting import until
from stepwell.access.access_keys import AccessKeys
from stepwell.atropos.app import create_atropos
from stepwell.atropos.http import MAX_BODY
from stepwell.common.listening import served_hosts
from stepwell.pool.client import PoolClient

TRAINER: dict[str, Any] = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 100,
}
ENVIRONMENT: dict[str, Any] = {"max_token_length": 32, "desired_name": "sums", "weight": 1.0, "group_size": 2}


def scored_group(first: int = 0, size: int = 2, **fields: Any) -> dict[str, Any]:
    """A group that is told from others by its first token."""
    tokens = [[first, n, 7, 8] for n in range(size)]
    return {
        "tokens": tokens,
        "masks": [[-100, -100, *row[2:]] for row in tokens],
        "scores": [float(n) for n in range(size)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25] for _ in range(size)],
        **fields,
    }


def firsts(batch: Sequence[dict[str, Any]]) -> list[int]:
    """By what its groups are told apart."""
    return [item["tokens"][0][0] for item in batch]


@asynccontextmanager
async def serve_atropos(
    pool: PoolClient,
    *,
    control_keys: Sequence[str] = (),
    state: Path | None = None,
    max_body: int = MAX_BODY,
) -> AsyncIterator[str]:
    """An Atropos server on a free loopback port; gives its URL."""
    hosts = served_hosts(LOOPBACK, (), has_keys=bool(control_keys))
    app = create_atropos(pool=pool, keys=AccessKeys(control_keys), state=state, max_body=max_body, hosts=hosts)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done(), "the Atropos server to start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def start_training(client: httpx.AsyncClient, **changes: Any) -> None:
    """Register a trainer and ask for a first batch, so that environments may come."""
    assert "uuid" in (await client.post("/register", json={**TRAINER, **changes})).json()
    assert (await client.get("/batch")).json() == {"batch": None}


async def join(client: httpx.AsyncClient, **changes: Any) -> int:
    """Register an environment; gives its number."""
    answer = (await client.post("/register-env", json={**ENVIRONMENT, **changes})).json()
    assert answer["status"] == "success"
    number: int = answer["env_id"]
    return number


async def status_of(client: httpx.AsyncClient, env_id: int) -> dict[str, Any]:
    answer = await client.request("GET", "/status-env", json={"env_id": env_id})
    assert answer.status_code == 200, answer.text
    status: dict[str, Any] = answer.json()
    return status


@contextmanager
def atropos_process(log: Path, *, port: int | None = None, **flags: object) -> Iterator[GatewayProcess]:
    """`stepwell atropos` with those flags, once it answers /health."""
    with served_process("stepwell", "atropos", flags=flags, log=log, port=port) as server:
        yield server
