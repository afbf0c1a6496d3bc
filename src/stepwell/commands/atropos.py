"""`stepwell atropos`, and the same server as a part of a gateway."""

from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.commands.sections import (
    Port,
    ServerSection,
    audit_of,
    check_listening,
    hosts_of,
    join_pool,
    keys_of,
    serve,
)
from stepwell.common.listening import ServedHosts

if TYPE_CHECKING:
    from stepwell.atropos.app import AtroposAsgi
    from stepwell.pool.client import PoolClient


class AtroposSettings(ServerSection, env_prefix="STEPWELL_ATROPOS_"):
    """Serve environments and trainers that were written for Atropos, with the DataPool as the storage.

    Paths below /channel/NAME serve further channels, each with its own trainer.
    """

    examples = ("stepwell atropos --port 8000 --state atropos.json",)

    state: str | None = None
    """File that keeps the registrations and the step count across restarts; without it, they are lost."""
    port: Port = 8000


def run_atropos(settings: AtroposSettings) -> None:
    """Serves until a signal ends it."""
    check_listening(settings)
    keys, audit = keys_of(settings), audit_of(settings)
    app = atropos_app(join_pool(settings), keys, audit, settings.state, hosts_of(settings))
    serve("Atropos server", app, settings)


def atropos_app(
    pool: "PoolClient", keys: AccessKeys, audit: AuditLog | None, state: str | None, hosts: ServedHosts | None
) -> "AtroposAsgi":
    from stepwell.atropos.app import create_atropos

    return create_atropos(pool=pool, keys=keys, audit=audit, state=Path(state) if state else None, hosts=hosts)
