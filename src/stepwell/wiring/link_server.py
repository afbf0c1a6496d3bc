"""`stepwell link`: keeps a link process running that other machines reach."""

import asyncio
import logging
import signal

from stepwell.common.listening import read_host_and_port
from stepwell.config.serving import LinkSettings
from stepwell.pool.client.link import RayLink
from stepwell.pool.client.link_listener import NetworkTerms
from stepwell.pool.client.network_link import read_secrets
from stepwell.wiring.server_settings import check_certificate, listening_socket

log = logging.getLogger("stepwell")


def run_link(settings: LinkSettings) -> None:
    """Until a signal ends it, also while Ray is away. Its clients repeat what is under way then."""
    check_certificate(settings)
    read_secrets(settings.secret_file)
    asyncio.run(_run(settings))


async def _run(settings: LinkSettings) -> None:
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
