"""Gateways for tests: one in the test's own event loop, and the real command as a process that can be killed."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from stepwell.gateway.asgi import MountedApp

from rig.waiting import answers, until, wait_until
from stepwell.access.access_keys import AccessKeys
from stepwell.access.key_file import KeyFile
from stepwell.commands.sections import IDLE_CONNECTION_TIMEOUT
from stepwell.common.bounded_http import BoundedHttp
from stepwell.common.listening import served_hosts
from stepwell.common.tokenizers import BackgroundTokenizer
from stepwell.engines import ENGINES
from stepwell.engines.engine import EngineKind, EngineTimeouts
from stepwell.engines.fleet import EngineFleet
from stepwell.gateway.app import GatewayApp, GatewayLimits
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.dialects.dialect import Dialect
from stepwell.pool.api.scoring import RewardScorer
from stepwell.pool.client import PoolClient

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 1_500
"""Above the ports of Ray's workers, below those that the kernel chooses; so many for each process of a run of tests."""
_given_ports: set[int] = set()
PATIENT = GatewayLimits(ask_timeout=30.0, render_timeout=30.0)
"""On a starved machine a call would otherwise be answered unchecked or unbridged, as it should for users."""


class NoTokenizer:
    """Proves that recording never asks for one."""

    def decode(self, ids: Sequence[int]) -> str:
        raise AssertionError("the tokenizer was used")


@asynccontextmanager
async def serve_gateway(
    pool: PoolClient,
    engine_urls: Sequence[str],
    *,
    rewards: RewardScorer | None = None,
    load_tokenizer: Callable[[str], Any] = lambda _: NoTokenizer(),
    prompt_length: int = 2048,
    response_length: int = 64,
    control_keys: Sequence[str] = (),
    issued: KeyFile | None = None,
    is_durable: bool = False,
    routing: str = "round_robin",
    kinds: Sequence[EngineKind] = ENGINES,
    timeouts: EngineTimeouts | None = None,
    atropos: MountedApp | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    limits: GatewayLimits = PATIENT,
    **more: Any,
) -> AsyncIterator[str]:
    """A gateway on a free loopback port; gives its URL."""
    app = GatewayApp(
        pool=pool,
        engines=EngineFleet(engine_urls, routing=routing, kinds=kinds, timeouts=timeouts),
        tokenizer=BackgroundTokenizer("no/such/folder", load_tokenizer),
        rewards=rewards,
        prompt_length=prompt_length,
        response_length=response_length,
        keys=AccessKeys(control_keys, issued),
        is_durable=is_durable,
        atropos=atropos,
        dialects=dialects,
        limits=limits,
        **{"hosts": served_hosts(LOOPBACK, (), has_keys=bool(control_keys)), **more},
    ).asgi()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=BoundedHttp,
            timeout_keep_alive=IDLE_CONNECTION_TIMEOUT,
            log_level="warning",
            access_log=False,
        )
    )
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done(), "the gateway to start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@dataclass(frozen=True)
class GatewayProcess:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """As the kernel does when memory runs out: no goodbye."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Of ports that the kernel gives to nobody by itself, and that other processes of the same run do not try: a server
    that is started later finds it free."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + PORTS * (worker % 8)
    while True:
        port = first + secrets.randbelow(PORTS)
        if port in _given_ports:
            continue
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            _given_ports.add(port)
            return port


@contextmanager
def gateway_process(
    log: Path, *, port: int | None = None, env: dict[str, str] | None = None, **flags: object
) -> Iterator[GatewayProcess]:
    """`python -m stepwell.gateway` with those flags, once it answers /health."""
    given = {"prompt_length": 2048, "response_length": 64, **flags}
    with served_process("stepwell.gateway", flags=given, log=log, port=port, env=env) as gateway:
        yield gateway


@contextmanager
def served_process(
    *command: str,
    flags: Mapping[str, object],
    log: Path,
    port: int | None = None,
    env: dict[str, str] | None = None,
    within: float = 120.0,
) -> Iterator[GatewayProcess]:
    """`python -m` a server of ours with those flags, on loopback, once it answers /health."""
    port = port or free_port()
    given = {"host": LOOPBACK, "port": port, **flags}
    url = f"{'https' if 'tls_cert' in flags else 'http'}://{LOOPBACK}:{port}"
    line = [sys.executable, "-m", *command]
    for name, value in given.items():
        line += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    with log.open("ab") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, env={**os.environ, **(env or {})})
    try:
        wait_until(lambda: process.poll() is not None or answers(f"{url}/health"), f"{url}/health", within)
        assert process.poll() is None, f"{' '.join(command)} ended:\n{log.read_text()}"
        yield GatewayProcess(url, process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
