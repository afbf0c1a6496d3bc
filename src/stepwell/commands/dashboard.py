"""`stepwell dashboard`."""

import asyncio
import os
import re
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, model_validator

from stepwell.access.access_keys import AccessKeys
from stepwell.commands.sections import (
    Addresses,
    Listed,
    Port,
    ServerSection,
    audit_of,
    check_listening,
    hosts_of,
    join_pool,
    keys_of,
    serve,
)
from stepwell.common.imports import require
from stepwell.common.listening import is_safe_url

if TYPE_CHECKING:
    from stepwell.dashboard.login import OidcLogin

OIDC_SECRET = "STEPWELL_DASHBOARD_OIDC_CLIENT_SECRET"
"""No setting: as a flag, other users could read it."""
PERSON = re.compile(r"group:.*\S.*|[^@\s:]+@[^@\s:]+")


def _are_people(value: tuple[str, ...]) -> tuple[str, ...]:
    for entry in value:
        if not PERSON.fullmatch(entry):
            raise ValueError(f"{entry!r} is neither a mail address nor group:NAME")
    return value


def _is_safe(value: str | None) -> str | None:
    if value is not None and not is_safe_url(value):
        raise ValueError(f"{value!r} is not an https address (http is for loopback only)")
    return value


People = Annotated[Listed, AfterValidator(_are_people)]
SafeAddress = Annotated[str | None, AfterValidator(_is_safe)]


class DashboardSettings(ServerSection, env_prefix="STEPWELL_DASHBOARD_"):
    """Serve a web page that shows the state of the pool, the gateways and the engines, and lets you curate data."""

    examples = ("stepwell dashboard --gateways http://127.0.0.1:8100 --tokenizer-path Qwen/Qwen3-0.6B --port 8200",)

    gateways: Addresses = ()
    """Addresses of the gateways to watch, separated by commas. The first control key is sent to them."""
    tokenizer_path: str | None = None
    """Folder or name of the Hugging Face tokenizer; without it, the page shows token ids, and text search is off."""
    oidc_issuer: SafeAddress = None
    """Let people log in at this OIDC provider: https://… . Needs control keys, --oidc-client-id, a list of people, and
    the extra `oidc` of the package."""
    oidc_client_id: str | None = None
    """The name by which the provider knows this dashboard. Its secret is no flag: STEPWELL_DASHBOARD_OIDC_CLIENT_SECRET
    in the environment; without it, the dashboard is a public client."""
    oidc_viewers: People = ()
    """Who may log in and look, separated by commas: mail addresses that the provider has verified, or group:NAME for
    all with that name in the claim `groups`."""
    oidc_curators: People = ()
    """Who may log in, look, and mark, reject and relabel; as in --oidc-viewers."""
    public_url: SafeAddress = None
    """Address at which browsers reach the dashboard, if a proxy is in front of it; the provider sends people back to
    it. Without it, the address that the browser asks for."""
    port: Port = 8200

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        people = (*self.oidc_viewers, *self.oidc_curators)
        if self.oidc_issuer is None and (people or self.oidc_client_id):
            raise ValueError("--oidc-client-id, --oidc-viewers and --oidc-curators need --oidc-issuer")
        if self.oidc_issuer is not None and not self.oidc_client_id:
            raise ValueError("--oidc-issuer needs --oidc-client-id, which the provider gives")
        if self.oidc_issuer is not None and not people:
            raise ValueError("--oidc-issuer needs --oidc-viewers or --oidc-curators: without them nobody may log in")
        if self.oidc_issuer is not None and not self.control_keys:
            raise ValueError(
                "--oidc-issuer needs control keys (STEPWELL_DASHBOARD_CONTROL_KEYS): the cookie of a person who is "
                "logged in is sealed with a secret that is made from them"
            )
        return self


def run_dashboard(settings: DashboardSettings) -> None:
    """Serves until a signal ends it."""
    from stepwell.common.tokenizers import BackgroundTokenizer, LoadedTokenizer
    from stepwell.dashboard.app import create_dashboard
    from stepwell.dashboard.gateway_monitor import GatewayMonitor

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
    from stepwell.dashboard.login import ListedPeople, OidcClient, OidcLogin

    client = OidcClient(settings.oidc_issuer, settings.oidc_client_id, os.environ.get(OIDC_SECRET) or None)
    people = ListedPeople(settings.oidc_viewers, settings.oidc_curators)
    return OidcLogin(client, people, keys, public_url=settings.public_url)
