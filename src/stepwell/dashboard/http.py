"""HTTP of the dashboard: JSON, the one place where failures become responses, origins and keys, and the headers of all
responses.

Invariants:
- If there are keys, all but the page itself, /health and the login needs one, or the cookie of a person who is logged
  in. A request with a key is judged by the key alone.
- The page runs no script and loads nothing from another origin.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeAlias

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell import errors
from stepwell.access.caller import Caller
from stepwell.access.route_table import DASHBOARD_ROUTES, STATIC, STATIC_ROOT, Route, RouteGuard
from stepwell.common import listening as cross_site
from stepwell.common.user_input import dotted, explain_all
from stepwell.pool.api.watching import TrajectorySnapshot

STATUS: Mapping[type[errors.StepwellError], int] = {
    errors.BadRequest: 400,
    errors.Forbidden: 401,
    errors.NotPermitted: 403,
    errors.UnknownTrajectory: 404,
    errors.NotReady: 503,
    errors.PoolUnavailable: 503,
    **cross_site.STATUS,
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
JSON = "application/json"
LOGIN = "login"
"""Where the page sends a person to log in."""
FindPerson: TypeAlias = Callable[[HTTPConnection], Caller | None]
"""Who is logged in, by the cookie of a request."""
JSON_OPTIONS = orjson.OPT_NON_STR_KEYS


def json_response(value: object, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type=JSON)


def as_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=JSON_OPTIONS, default=_plain)
    except orjson.JSONEncodeError:  # metadata may have integers of any length, and lone surrogates
        return json.dumps(_plain_tree(value), default=_plain).encode()


def _plain_tree(value: object) -> object:
    """A form for Python's json, which writes every named tuple as a list."""
    if isinstance(value, TrajectorySnapshot) or is_dataclass(value):
        value = _plain(value)
    if isinstance(value, Mapping):
        return {key: _plain_tree(item) for key, item in value.items()}
    return [_plain_tree(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: object) -> object:
    """Values that orjson does not know, mostly named tuples."""
    if isinstance(value, TrajectorySnapshot):
        return value.public()
    if isinstance(value, tuple):
        return list(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


def error_response(status: int, message: str, **more: str) -> Response:
    return json_response({"error": {"message": message, **more}}, status)


def install(
    app: FastAPI, guard: RouteGuard, check: cross_site.CrossSiteCheck, find_person: FindPerson | None = None
) -> None:
    app.add_middleware(OriginGuard, check=check)
    app.add_middleware(KeyGuard, guard=guard, find_person=find_person)  # around it: its headers are in every response

    @app.exception_handler(errors.StepwellError)
    async def known(_: Request, failure: errors.StepwellError) -> Response:
        return error_response(STATUS.get(type(failure), 500), str(failure))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, failure: RequestValidationError) -> Response:
        return error_response(400, explain_all(failure.errors(), lambda place: dotted(place[1:])))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, failure: HTTPException) -> Response:
        return error_response(failure.status_code, f"{request.method} {request.url.path}: {failure.detail}")

    @app.exception_handler(Exception)
    async def unknown(_: Request, failure: Exception) -> Response:
        return error_response(500, f"the dashboard failed ({type(failure).__name__}); its log says more")


class OriginGuard:
    """Refuses requests of other sites before a route reads them."""

    def __init__(self, app: ASGIApp, check: cross_site.CrossSiteCheck) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http":
            try:
                self._check.check(scope["method"], scope["headers"])
            except errors.StepwellError as failure:
                answer = error_response(STATUS[type(failure)], str(failure))
        await answer(scope, receive, send)


class KeyGuard:
    """Checks the key or the cookie before the request is read, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, guard: RouteGuard, find_person: FindPerson | None = None) -> None:
        """Without `find_person`, nobody can log in."""
        self._app = app
        self._guard = guard
        self._find_person = find_person

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_data = scope["path"].startswith(("/api", "/metrics", f"/{LOGIN}"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers["Cache-Control"] = "no-store" if is_data else "no-cache"
            await send(message)

        route = route_of(scope["method"], scope["path"])
        key = dict(scope["headers"]).get(b"authorization")
        by_cookie = self._find_person if key is None and not route.is_open else None
        person = by_cookie(HTTPConnection(scope)) if by_cookie else None
        try:
            caller = self._guard.admit(route, scope, key, person=person)
        except errors.StepwellError as failure:
            await self._refusal(failure)(scope, receive, send_with_headers)
        else:
            await self._guard.serve(self._app, route, caller, scope, receive, send_with_headers)

    def _refusal(self, failure: errors.StepwellError) -> Response:
        """The refusal; it says where to log in, if that would help."""
        more = {"login": LOGIN} if self._find_person and isinstance(failure, errors.Forbidden) else {}
        return error_response(STATUS[type(failure)], str(failure), **more)


def route_of(method: str, path: str) -> Route:
    return DASHBOARD_ROUTES.find(method, STATIC if path.startswith(STATIC_ROOT) else path)
