"""`stepwell dashboard`."""

import asyncio
import os
from typing import TYPE_CHECKING

from stepwell.access.access_keys import AccessKeys
from stepwell.common.optional import require
from stepwell.common.tokenizers import BackgroundTokenizer, LoadedTokenizer
from stepwell.config.serving import DashboardSettings
from stepwell.dashboard.app import create_dashboard
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.login.people import ListedPeople
from stepwell.wiring.http_server import serve
from stepwell.wiring.pool_access import join_pool
from stepwell.wiring.server_settings import audit_of, check_listening, hosts_of, keys_of

if TYPE_CHECKING:
    from stepwell.dashboard.login.oidc import OidcLogin

OIDC_SECRET = "STEPWELL_DASHBOARD_OIDC_CLIENT_SECRET"
"""No setting: as a flag, other users could read it."""


def run_dashboard(settings: DashboardSettings) -> None:
    """Serves until a signal ends it."""
    check_listening(settings)
    keys = keys_of(settings)
    login = login_of(settings, keys)
    plan = asyncio.run(join_pool(settings).shards.plan())
    path = settings.tokenizer_path
    app = create_dashboard(
        pool=join_pool(settings),  # another one: a client belongs to one event loop
        keys=keys,
        audit=audit_of(settings),
        plan=plan,
        tokenizer=BackgroundTokenizer(path, LoadedTokenizer.load) if path else None,
        gateways=GatewayMonitor(settings.gateways, settings.control_keys[0] if settings.control_keys else None),
        hosts=hosts_of(settings),
        login=login,
    )
    serve("dashboard", app, settings)


def login_of(settings: DashboardSettings, keys: AccessKeys) -> "OidcLogin | None":
    """BadRequest if people are to log in and the extra `oidc` is not installed."""
    if settings.oidc_issuer is None or settings.oidc_client_id is None:
        return None
    require("authlib.integrations.starlette_client", "oidc", purpose="--oidc-issuer")
    from stepwell.dashboard.login.oidc import OidcClient, OidcLogin

    client = OidcClient(settings.oidc_issuer, settings.oidc_client_id, os.environ.get(OIDC_SECRET) or None)
    people = ListedPeople(settings.oidc_viewers, settings.oidc_curators)
    return OidcLogin(client, people, keys, public_url=settings.public_url)
