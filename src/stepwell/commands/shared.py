"""Helpers that several commands use with their settings: to reach the DataPool, serve HTTP, and ask servers over HTTP.

What serves is imported by the function that serves: a process that only keeps others running does without it.
"""

import gc
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.key_file import KeyFile
from stepwell.commands.sections import PoolSection, ServerSection
from stepwell.common import listening
from stepwell.common.listening import ServedHosts
from stepwell.errors import NotReady

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from stepwell.pool.client import PoolClient
    from stepwell.pool.client.link import LinkClient
    from stepwell.steps.step import Json

log = logging.getLogger("stepwell")

BACKLOG = 2048
"""Connections that wait to be accepted."""
TLS_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The ciphers for TLS 1.2; those of TLS 1.3 are all as good."""
GC_THRESHOLD = (50_000, 20, 50)
"""A call makes about a thousand small objects, nearly all without cycles; so cycles are searched for less often."""
IDLE_CONNECTION_TIMEOUT = 75
"""Seconds; longer than the 60 of common load balancers and HTTP clients, so that they close first: a server that does
may do so while the next request is on its way."""
ANSWER_TIMEOUT = 5.0
"""Seconds that a server may take to answer a question of a command."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def join_pool(settings: PoolSection) -> "PoolClient":
    """Joins by a link over the network, if the settings name one; otherwise this process joins Ray."""
    from stepwell.pool.client import PoolClient
    from stepwell.pool.client.ray_cluster import join_ray

    link = network_link(settings) if isinstance(settings, ServerSection) else None
    if link is None:
        join_ray(settings.ray_address, settings.ray_namespace)
    else:
        link.start()
    return PoolClient(settings.data_pool_name, settings.ray_namespace, transport=link)


def network_link(settings: ServerSection) -> "LinkClient | None":
    if settings.link is None or settings.link_secret_file is None:
        return None
    from stepwell.pool.client.link import NetworkLink

    return NetworkLink(*settings.link, secret_file=settings.link_secret_file, ca_file=settings.link_ca_file)


def check_listening(settings: ServerSection) -> None:
    """Checks host, keys and certificate before anything is started."""
    variable = f"{settings.model_config.get('env_prefix')}CONTROL_KEYS"
    listening.require_safe_address(
        settings.host, has_keys=bool(settings.control_keys), insecure=settings.insecure, variable=variable
    )
    if not settings.control_keys and not listening.is_loopback(settings.host):
        log.warning("listening on %s without keys: access is open to everyone", settings.host)
    check_certificate(settings.tls_cert, settings.tls_key)


def check_certificate(certificate: str | None, key: str | None) -> None:
    if certificate and key and (why := listening.check_certificate(certificate, key)):
        log.warning("%s", why)


def listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as failure:
        raise NotReady(f"cannot listen on {host}:{port}: {failure.strerror}") from None


def keys_of(settings: ServerSection) -> AccessKeys:
    return AccessKeys(settings.control_keys, KeyFile(Path(settings.keys_file)) if settings.keys_file else None)


def audit_of(settings: ServerSection) -> AuditLog | None:
    return AuditLog(Path(settings.audit_log)) if settings.audit_log else None


def hosts_of(settings: ServerSection) -> ServedHosts | None:
    return listening.served_hosts(settings.host, settings.allowed_hosts, has_keys=bool(settings.control_keys))


def serve(name: str, app: "ASGIApp", settings: ServerSection, sockets: Sequence[socket.socket] = ()) -> None:
    """Serves until a signal ends it, on its host and port, unless sockets are given that listen already."""
    import uvicorn

    from stepwell.common.bounded_http import MOST_CONNECTIONS, BoundedHttp

    log.info("%s on %s", name, settings.url)
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


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    status: int
    """0 if there was no answer."""
    body: "Json"
    """The parsed answer; without an answer, or if it is not JSON, a text that says so."""

    @property
    def message(self) -> str:
        """The error text of a refusal, in any of the usual formats."""
        match self.body:
            case (
                {"error": {"message": str(text)}}
                | {"message": str(text)}
                | {"detail": str(text)}
                | {"error": str(text)}
            ):
                return text
        return f"it answers {self.status}" if self.status else str(self.body)


def get_json(url: str, key: str | None = None, timeout: float = ANSWER_TIMEOUT) -> JsonAnswer:
    """A GET request to a server on this machine or near it, without a proxy."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with DIRECT.open(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            return JsonAnswer(answer.status, _parsed(answer.read()))
    except urllib.error.HTTPError as refusal:
        with refusal:
            return JsonAnswer(refusal.code, _parsed(refusal.read()))
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        return JsonAnswer(0, getattr(reason, "strerror", None) or str(reason))


def _parsed(raw: bytes) -> "Json":
    try:
        parsed: Json = json.loads(raw)
    except ValueError:
        return raw[:200].decode(errors="replace")
    return parsed
