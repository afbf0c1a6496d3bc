"""A proxy before an engine, real or fake: it gives another version, or takes a capability away."""

import json
from collections.abc import Collection
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

RENDERERS = ("/v1/chat/completions/render", "/tokenize")
SCALE_OUT = ("/inference/v1/generate", "/v1/chat/completions/render", "/v1/chat/completions/derender")
CONTROL = ("/weight_info", "/is_paused", "/pause", "/resume", "/update_weight_version", "/collective_rpc")
NO_TOOLS = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
NOT_FORWARDED = ("Host", "Content-Length", "Transfer-Encoding", "Content-Encoding")


class EngineProxy:
    """Open it with `async with`; `url` is valid inside. Streams pass through as they come."""

    def __init__(
        self,
        engine: str,
        *,
        version: str = "",
        closed: Collection[str] = (),
        without_tools: bool = False,
        drops: Collection[str] = (),
        hides: Collection[str] = (),
    ) -> None:
        """`closed` paths answer 404. Of requests, the fields in `drops` are left out; of whole replies and their
        choices, those in `hides`."""
        self.url = ""
        self._engine = engine
        self._version = version
        self._closed = closed
        self._without_tools = without_tools
        self._drops, self._hides = frozenset(drops), frozenset(hides)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if request.path in self._closed:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/version" and self._version:
            return web.json_response({"version": self._version})
        body = await request.read()
        asked: Any = json.loads(body) if body else None
        if isinstance(asked, dict):
            if self._without_tools and asked.get("tools") and request.path == "/v1/chat/completions":
                return web.json_response({"error": {"message": NO_TOOLS}}, status=400)
            body = json.dumps({name: value for name, value in asked.items() if name not in self._drops}).encode()
        headers = {name: value for name, value in request.headers.items() if name not in NOT_FORWARDED}
        url = self._engine + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as reply:
            if reply.content_type == "application/json" and self._hides:
                return web.json_response(self._hidden(await reply.json()), status=reply.status)
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                await response.write(piece)
            return response

    def _hidden(self, reply: Any) -> Any:
        if not isinstance(reply, dict):
            return reply
        shown = {name: value for name, value in reply.items() if name not in self._hides}
        if isinstance(choices := shown.get("choices"), list):
            shown["choices"] = [self._hidden(choice) for choice in choices]
        return shown
