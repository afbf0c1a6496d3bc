"""`stepwell atropos`, and the same server as a part of a gateway."""

from pathlib import Path

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.atropos.app import AtroposAsgi, create_atropos
from stepwell.common.listening import ServedHosts
from stepwell.config.serving import AtroposSettings
from stepwell.pool.client import PoolClient
from stepwell.wiring.http_server import serve
from stepwell.wiring.pool_access import join_pool
from stepwell.wiring.server_settings import audit_of, check_listening, hosts_of, keys_of


def run_atropos(settings: AtroposSettings) -> None:
    """Serves until a signal ends it."""
    check_listening(settings)
    keys, audit = keys_of(settings), audit_of(settings)
    app = atropos_app(join_pool(settings), keys, audit, settings.state, hosts_of(settings))
    serve("Atropos server", app, settings)


def atropos_app(
    pool: PoolClient, keys: AccessKeys, audit: AuditLog | None, state: str | None, hosts: ServedHosts | None
) -> AtroposAsgi:
    return create_atropos(pool=pool, keys=keys, audit=audit, state=Path(state) if state else None, hosts=hosts)
