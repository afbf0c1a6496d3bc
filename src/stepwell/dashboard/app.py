"""The dashboard's ASGI application: built from its parts, with the files of the page."""

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, HTTPException, Response

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.route_guard import RouteGuard
from stepwell.access.route_table import STATIC
from stepwell.common.cross_site import CrossSiteCheck
from stepwell.common.listening import LOOPBACK_HOSTS, ServedHosts
from stepwell.common.tokenizers import Tokenizer
from stepwell.dashboard import http
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.login_routes import login_router
from stepwell.dashboard.metrics import exposition
from stepwell.dashboard.routes import api_router
from stepwell.dashboard.state import DashboardState
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient

if TYPE_CHECKING:
    from stepwell.dashboard.login.oidc import OidcLogin  # needs the extra `oidc`

PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
"""The media types of the page's files. The system's own table is not used, because it may name another type for
JavaScript."""


def create_dashboard(
    *,
    pool: PoolClient,
    plan: PoolPlan,
    keys: AccessKeys,
    gateways: GatewayMonitor,
    tokenizer: Tokenizer | None,
    audit: AuditLog | None = None,
    hosts: ServedHosts | None = LOOPBACK_HOSTS,
    login: "OidcLogin | None" = None,
) -> FastAPI:
    """`hosts` are the names by which it may be asked; None: any. Without `login`, people need a key."""
    state = DashboardState(pool, plan, gateways, tokenizer)

    app = FastAPI(
        title="Stepwell dashboard",
        lifespan=lambda _: state.following(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    http.install(app, RouteGuard(keys, audit), CrossSiteCheck(hosts), login.caller if login else None)
    app.include_router(api_router(state))
    app.include_router(login_router(login))
    app.include_router(page_router())

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answers while the process lives."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics_now() -> Response:
        """The pool's figures, for Prometheus."""
        body, content_type = await exposition(state)
        return Response(body, media_type=content_type)

    return app


def page_router() -> APIRouter:
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return _page_file("index.html")

    @router.get(STATIC, include_in_schema=False)
    async def static(name: str) -> Response:
        return _page_file(name)

    return router


def _page_file(name: str) -> Response:
    path = (PAGE / name).resolve()
    media_type = MEDIA_TYPES.get(path.suffix)
    if media_type is None or not path.is_relative_to(PAGE) or not path.is_file():
        raise HTTPException(404, "not found")
    return Response(path.read_bytes(), media_type=media_type)
