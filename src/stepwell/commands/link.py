"""`stepwell link`: keeps a link process running that other machines reach."""

import asyncio
import logging
import signal
from typing import Annotated

from pydantic import AfterValidator

from stepwell.commands.sections import (
    PoolSection,
    check_certificate,
    listening_socket,
)
from stepwell.common.listening import read_host_and_port

log = logging.getLogger("stepwell")


def _is_host_and_port(value: str) -> str:
    read_host_and_port(value)
    return value


class LinkSettings(PoolSection, env_prefix="STEPWELL_LINK_"):
    """Let gateways, dashboards and Atropos servers on machines without Ray use the DataPool, over TLS.

    Run it on a machine of the Ray cluster. Several may run, for the same pool.
    """

    examples = ("stepwell link --listen 0.0.0.0:8300 --tls-cert cert.pem --tls-key key.pem --secret-file link-secret",)

    listen: Annotated[str, AfterValidator(_is_host_and_port)]
    """Address to listen on, host:port."""
    tls_cert: str
    """File with the certificate, in PEM. Without TLS, whoever sees the network would read the pool's data."""
    tls_key: str
    """File with the key of the certificate, in PEM, not encrypted."""
    secret_file: str
    """File with the secret that clients must know, of 32 characters or more, which no other user can read; openssl rand
    -hex 32 makes one. With several, one in each line, each lets in."""


def run_link(settings: LinkSettings) -> None:
    """Runs the link until a signal ends it, also while Ray is away. Its clients repeat what is under way then."""
    from stepwell.pool.client.link import read_secrets

    check_certificate(settings.tls_cert, settings.tls_key)
    read_secrets(settings.secret_file)
    asyncio.run(_run_link(settings))


async def _run_link(settings: LinkSettings) -> None:
    from stepwell.pool.client.link import RayLink
    from stepwell.pool.client.link_process import NetworkTerms

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    network = NetworkTerms(settings.data_pool_name, settings.tls_cert, settings.tls_key, settings.secret_file)
    with listening_socket(*read_host_and_port(settings.listen)) as listener:
        link = RayLink(settings.ray_address, settings.ray_namespace, listener=listener, network=network)
        try:
            await asyncio.to_thread(link.start)
            link.keep_running()
            log.info("link to DataPool %r on %s", settings.data_pool_name, settings.listen)
            await ended.wait()
        finally:
            await link.close()
