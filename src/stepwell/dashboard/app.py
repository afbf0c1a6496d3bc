"""The dashboard's ASGI application: built from its parts, with the files of the page."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.route_table import STATIC, RouteGuard
from stepwell.common.listening import LOOPBACK_HOSTS, CrossSiteCheck, ServedHosts
from stepwell.common.tokenizers import Tokenizer
from stepwell.dashboard import http
from stepwell.dashboard.gateway_monitor import GatewayMonitor
from stepwell.dashboard.http import STATUS
from stepwell.dashboard.metrics import exposition
from stepwell.dashboard.queries import DashboardState
from stepwell.dashboard.routes import api_router
from stepwell.errors import StepwellError
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.client import PoolClient

if TYPE_CHECKING:
    from stepwell.dashboard.login import OidcLogin  # needs the extra `oidc`

OFF = "Nobody can log in here: this dashboard was started without --oidc-issuer. Use a key."
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


def login_router(login: "OidcLogin | None") -> APIRouter:
    """The routes by which people log in and out. They are read by people, so that a failure is a page and not JSON."""
    router = APIRouter(include_in_schema=False)

    @router.get("/login")
    async def begin(request: Request) -> Response:
        if login is None:
            return _page(404, OFF, home="./")
        try:
            return await login.begin(request)
        except StepwellError as failure:
            return _page(STATUS[type(failure)], str(failure), home="./")

    @router.get("/login/callback")
    async def finish(request: Request) -> Response:
        if login is None:
            return _page(404, OFF, home="../")
        try:
            answer = await login.finish(request)
        except StepwellError as failure:
            answer = _page(STATUS[type(failure)], str(failure), home="../")
        login.end_attempt(request, answer)
        return answer

    @router.post("/logout")
    async def end(request: Request) -> Response:
        """Ends the session of the dashboard, and works without one too. The one at the provider stays."""
        if login is None:
            return _page(404, OFF, home="./")
        answer = Response(status_code=204)
        login.end_session(request, answer)
        return answer

    return router


def _page(status: int, text: str, home: str) -> Response:
    said = escape(text[:1].upper() + text[1:])
    body = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Stepwell</title>\n<p>{said}.</p>\n'
    return HTMLResponse(f'{body}<p><a href="{home}">To the dashboard</a></p>\n</html>\n', status)
