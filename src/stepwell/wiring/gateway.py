"""`stepwell gateway`: one process that serves, or one that keeps several workers and their link to Ray running.

The latter serves nothing itself and does not import the gateway: gateway_server.py is imported where it is used.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from stepwell import logs
from stepwell.common.die_with_parent import set_parent_death_signal
from stepwell.common.worker_processes import CANNOT_START, WorkerProcesses
from stepwell.config.serving import GatewaySettings
from stepwell.errors import StepwellError
from stepwell.pool.client.link import LinkClient, RayLink, SharedLink
from stepwell.wiring.pool_access import network_link
from stepwell.wiring.server_settings import check_listening, listening_socket, url_of

log = logging.getLogger("stepwell")


def run_gateway(settings: GatewaySettings) -> None:
    """Serves until a signal ends it, also while Ray is away."""
    check_listening(settings)
    if settings.workers > 1:
        asyncio.run(_run_workers(settings))
        return
    link = network_link(settings) or RayLink(settings.ray_address, settings.ray_namespace)
    link.start()
    _serve("gateway", settings, link)


async def _run_workers(settings: GatewaySettings) -> None:
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-") as folder,
        listening_socket(settings.host, settings.port) as shared,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder) / "link")
        listener.bind(path)
        listener.listen()
        link = network_link(settings) or RayLink(settings.ray_address, settings.ray_namespace, listener=listener)
        await asyncio.to_thread(link.start)
        link.keep_running()
        log.info("gateway on %s, %d workers", url_of(settings), settings.workers)

        def make(number: int) -> BaseProcess:
            return spawn.Process(target=_run_worker, args=(settings, number, path, shared, os.getpid()))

        try:
            await WorkerProcesses(settings.workers, make).run()
        finally:
            await link.close()


def _run_worker(settings: GatewaySettings, number: int, path: str, shared: socket.socket, parent: int) -> None:
    """A process of its own. It ends, and first delivers its steps, when its parent ends."""
    set_parent_death_signal(parent, signal.SIGTERM)
    logs.setup(json=os.environ.get("STEPWELL_LOG") == "json")
    settings = settings.of_worker(number)
    link = network_link(settings) or SharedLink(path)
    try:
        link.start()
        own = listening_socket(settings.host, settings.port)
        _serve(f"worker {number} of the gateway", settings, link, Path(path).with_name("engines"), (shared, own))
    except StepwellError as failure:
        log.error("worker %d: %s", number, failure)
        sys.exit(CANNOT_START)


def _serve(
    name: str,
    settings: GatewaySettings,
    link: LinkClient,
    watch: Path | None = None,
    sockets: Sequence[socket.socket] = (),
) -> None:
    from stepwell.wiring.gateway_server import serve_gateway  # three quarters of a worker's memory

    serve_gateway(name, settings, link, watch, sockets)
