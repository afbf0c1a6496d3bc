"""The ASGI application of the Atropos server: origins, keys and routing.

Every path of Atropos is served at the root for the channel `train`, and below /channel/NAME for other channels. A
client of another channel only needs another base URL.

Invariant: if there are keys, only /health and /ready answer without one.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog
from stepwell.access.route_table import ATROPOS_ROUTES, RouteGuard
from stepwell.atropos import http
from stepwell.atropos.http import AtroposRequest, json_response
from stepwell.atropos.registry import AtroposMetrics, Registries, RegistryFile
from stepwell.common.listening import JSON, LOOPBACK_HOSTS, CrossSiteCheck, ServedHosts
from stepwell.errors import Forbidden, StepwellError
from stepwell.pool.api.producing import TRAIN
from stepwell.pool.client import PoolClient
from stepwell.wire.scored_groups_arrow import MEDIA_TYPE, has_arrow

log = logging.getLogger("stepwell.atropos")

CHANNEL_PATH = re.compile(r"/channel/([A-Za-z0-9_.\-]{1,128})(/.*)?")
IN_URL = "; or in the URL: http://:KEY@host:port"


def create_atropos(
    *,
    pool: PoolClient,
    keys: AccessKeys,
    state: Path | None,
    audit: AuditLog | None = None,
    max_body: int = http.MAX_BODY,
    hosts: ServedHosts | None = LOOPBACK_HOSTS,
) -> "AtroposAsgi":
    """`hosts` are the names by which it may be asked; None: any."""
    registries = Registries(RegistryFile(state) if state else None, time.monotonic())
    cross_site = CrossSiteCheck(hosts, (JSON, MEDIA_TYPE.encode()), gets_change=True)
    return AtroposAsgi(pool, RouteGuard(keys, audit), registries, max_body, cross_site)


class AtroposAsgi:
    def __init__(
        self,
        pool: PoolClient,
        guard: RouteGuard,
        registries: Registries,
        max_body: int,
        cross_site: CrossSiteCheck,
    ) -> None:
        self._pool = pool
        self._guard = guard
        self._cross_site = cross_site
        self._max_body = max_body
        self._metrics = AtroposMetrics(registries.steps, lambda: registries.connected(time.monotonic()))
        self._channel_routes = AtroposRoutes(pool, registries, self._metrics).routes
        self._server_routes: Mapping[str, Callable[[], Awaitable[Response]]] = {
            "/": self.root,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside the block it follows the pool's policy version."""
        following = asyncio.create_task(self._pool.follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def root(self) -> Response:
        return json_response({"message": "Stepwell Atropos server", "arrow": has_arrow()})

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        try:
            await self._pool.check()
        except StepwellError as failure:
            return json_response({"ready": False, "missing": {"data_pool": str(failure)}}, 503)
        return json_response({"ready": True, "missing": {}})

    async def metrics(self) -> Response:
        body, content_type = self._metrics.exposition()
        return Response(body, media_type=content_type)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        channel, call = self._asked(scope["path"] or "/")
        route = ATROPOS_ROUTES.find(scope["method"], call)
        authorization = dict(scope["headers"]).get(b"authorization")
        is_of_channel = call not in self._server_routes
        try:
            self._cross_site.check(scope["method"], scope["headers"])
            caller = self._guard.admit(route, scope, authorization, channel=channel if is_of_channel else None)
        except Forbidden as failure:
            response = http.error_response(Forbidden(f"{failure}{IN_URL}"))
            await response(scope, receive, send)
        except StepwellError as failure:
            await http.error_response(failure)(scope, receive, send)
        else:
            await self._guard.serve(partial(self._answer, channel, call), route, caller, scope, receive, send)

    def _asked(self, path: str) -> tuple[str, str]:
        """The channel, and the path in it. A path of the server has none, and is not found below a channel."""
        found = CHANNEL_PATH.fullmatch(path)
        if found is None or found[2] is None or found[2] in self._server_routes:
            return TRAIN, path
        return found[1], found[2]

    async def _answer(self, channel: str, call: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(channel, call, AtroposRequest(scope, receive, self._max_body))
        except ClientDisconnect:
            return
        except StepwellError as failure:
            response = http.error_response(failure)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            response = json_response({"detail": "the Atropos server failed; its log says more"}, 500)
        await response(scope, receive, send)

    async def _respond(self, channel: str, call: str, request: AtroposRequest) -> Response:
        if request.method == "GET" and call in self._server_routes:
            return await self._server_routes[call]()
        handler = self._channel_routes.get((request.method, call))
        if handler is None:
            return json_response({"detail": f"{request.method} {request.scope['path']}: not found"}, 404)
        return await handler(channel, request)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
