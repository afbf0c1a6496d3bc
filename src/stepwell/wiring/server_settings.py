"""What all HTTP servers make of their settings: address, keys, audit log, host names."""

import logging
import socket
from pathlib import Path
from typing import TypeAlias

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.key_file import KeyFile
from stepwell.common import listening
from stepwell.common.listening import ServedHosts
from stepwell.config.sections import ServerSection
from stepwell.config.serving import AtroposSettings, DashboardSettings, GatewaySettings, LinkSettings
from stepwell.errors import NotReady

log = logging.getLogger("stepwell")

BACKLOG = 2048
"""Connections that wait to be accepted."""

ServerSettings: TypeAlias = GatewaySettings | AtroposSettings | DashboardSettings


def check_listening(settings: ServerSettings) -> None:
    """Before anything is started."""
    variable = f"{settings.model_config.get('env_prefix')}CONTROL_KEYS"
    listening.require_safe_address(
        settings.host, has_keys=bool(settings.control_keys), insecure=settings.insecure, variable=variable
    )
    if not settings.control_keys and not listening.is_loopback(settings.host):
        log.warning("listening on %s without keys: access is open to everyone", settings.host)
    check_certificate(settings)


def check_certificate(settings: ServerSettings | LinkSettings) -> None:
    if (
        settings.tls_cert
        and settings.tls_key
        and (why := listening.check_certificate(settings.tls_cert, settings.tls_key))
    ):
        log.warning("%s", why)


def listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as failure:
        raise NotReady(f"cannot listen on {host}:{port}: {failure.strerror}") from None


def hosts_of(settings: ServerSettings) -> ServedHosts | None:
    return listening.served_hosts(settings.host, settings.allowed_hosts, has_keys=bool(settings.control_keys))


def url_of(settings: ServerSettings) -> str:
    return f"{settings.scheme}://{settings.host}:{settings.port}"


def keys_of(settings: ServerSection) -> AccessKeys:
    return AccessKeys(settings.control_keys, KeyFile(Path(settings.keys_file)) if settings.keys_file else None)


def audit_of(settings: ServerSection) -> AuditLog | None:
    return AuditLog(Path(settings.audit_log)) if settings.audit_log else None
