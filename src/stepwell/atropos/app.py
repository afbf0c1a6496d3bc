"""The door's ASGI application: keys and routes.

Every path of Atropos is served at the root, for the channel `train`, and below /channel/NAME for the channel of that
name, so that a client of another channel only has another base URL. What always holds: where there are control keys,
nothing but /health and /ready is answered without one.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl

from stepwell.atropos import http
from stepwell.atropos.bodies import ClientGone, Message, Receive
from stepwell.atropos.http import Answer, LongAnswer, Request, Send, json_answer
from stepwell.atropos.metrics import Sight
from stepwell.atropos.registries import Registries
from stepwell.atropos.routes import Calls, Handler
from stepwell.atropos.state import StateFile
from stepwell.common.access_keys import AccessKeys
from stepwell.errors import Forbidden, StepwellError
from stepwell.pool.api.ports import GroupExchange
from stepwell.pool.api.producing import TRAIN
from stepwell.wire.scored_groups_arrow import has_arrow

log = logging.getLogger("stepwell.door")

BELOW_A_CHANNEL = re.compile(r"/channel/([A-Za-z0-9_.\-]{1,128})(/.*)?")
OPEN = ("/health", "/ready")
FORBIDDEN = (
    "this needs a control key; send it as the header Authorization: Bearer KEY, or in the URL: http://:KEY@host:port"
)


def create_door(*, pool: GroupExchange, keys: AccessKeys, state: Path | None) -> "Door":
    return Door(pool, keys, Registries(StateFile(state) if state else None, time.monotonic()))


class Door:
    def __init__(self, pool: GroupExchange, keys: AccessKeys, registries: Registries) -> None:
        self._pool = pool
        self._keys = keys
        self._sight = Sight(registries.steps, lambda: registries.connected(time.monotonic()))
        self._calls = Calls(pool, registries, self._sight)
        self._own: Mapping[str, Callable[[], Awaitable[Answer]]] = {
            "/": self.root,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
        }
        """By path: what has to do with no channel."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it serves, it keeps up with the pool's policy version."""
        following = asyncio.create_task(self._pool.follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def root(self) -> Answer:
        return json_answer({"message": "Stepwell Atropos door", "arrow": has_arrow()})

    async def health(self) -> Answer:
        return json_answer({"status": "ok"})

    async def ready(self) -> Answer:
        try:
            await self._pool.check()
        except StepwellError as failure:
            return json_answer({"ready": False, "missing": {"data_pool": str(failure)}}, 503)
        return json_answer({"ready": True, "missing": {}})

    async def metrics(self) -> Answer:
        body, content_type = self._sight.exposition()
        return Answer(body, content_type=content_type)

    # -- how -----------------------------------------------------------------------------------------------------------

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            answer = await self._answer(scope, headers, receive)
        except ClientGone:
            return
        except StepwellError as failure:
            answer = http.explained(failure)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            answer = json_answer({"detail": "the door failed; its log says more"}, 500)
        if isinstance(answer, LongAnswer):
            await http.write_long(answer, receive, send, as_zstd=http.takes_zstd(headers))
        else:
            await http.write(answer, send)

    async def _answer(self, scope: Message, headers: Mapping[str, str], receive: Receive) -> Answer | LongAnswer:
        method, path = scope["method"], scope["path"] or "/"
        if path not in OPEN and not self._keys.may_control(headers.get("authorization")):
            raise Forbidden(FORBIDDEN)
        if method == "GET" and path in self._own:
            return await self._own[path]()
        channel, handler = self._routed(method, path)
        if handler is None:
            return _unrouted(method, path)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        return await handler(channel, Request(headers, query, receive))

    def _routed(self, method: str, path: str) -> tuple[str, Handler | None]:
        below = BELOW_A_CHANNEL.fullmatch(path)
        channel, call = (below[1], below[2]) if below else (TRAIN, path)
        return channel, self._calls.routes.get((method, call))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _unrouted(method: str, path: str) -> Answer:
    return json_answer({"detail": f"{method} {path}: not found"}, 404)
