"""Serves an ASGI application with uvicorn."""

import gc
import logging
import socket
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

from stepwell.common.bounded_http import MOST_CONNECTIONS, BoundedHttp
from stepwell.wiring.server_settings import ServerSettings, url_of

log = logging.getLogger("stepwell")

TLS_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2; those of TLS 1.3 are all as good."""
GC_THRESHOLD = (50_000, 20, 50)
"""A call makes about a thousand small objects, nearly all without cycles; so cycles are searched for less often."""
IDLE_CONNECTION_TIMEOUT = 75
"""Seconds; longer than the 60 of common load balancers and HTTP clients, so that they close first: a server that does
may do so while the next request is on its way."""


def serve(name: str, app: ASGIApp, settings: ServerSettings, sockets: Sequence[socket.socket] = ()) -> None:
    """Until a signal ends it. On its host and port, unless sockets are given that listen already."""
    log.info("%s on %s", name, url_of(settings))
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        timeout_keep_alive=IDLE_CONNECTION_TIMEOUT,
        http=BoundedHttp,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ciphers=TLS_CIPHERS,
        limit_concurrency=MOST_CONNECTIONS,
        log_config=None,
        log_level="warning",
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=list(sockets) or None)
