"""The routes by which people log in and out. They are read by people, so that a failure is a page and not JSON."""

from html import escape
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from stepwell.dashboard.http import STATUS
from stepwell.errors import StepwellError

if TYPE_CHECKING:
    from stepwell.dashboard.login.oidc import OidcLogin  # needs the extra `oidc`

OFF = "Nobody can log in here: this dashboard was started without --oidc-issuer. Use a key."


def login_router(login: "OidcLogin | None") -> APIRouter:
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
