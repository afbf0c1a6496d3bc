"""The fake engine's HTTP: routes, the sending of answers, and the faults that are a matter of sending."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from stepwell.engines.capabilities import PROBE_USER

from rig.fake_engine.admin import BODY, add_admin_routes, add_plain_routes, answering, json_response
from rig.fake_engine.asking import Ask, Json, RefusedError, fit
from rig.fake_engine.chat import Chat
from rig.fake_engine.completions import Completions
from rig.fake_engine.derender import derender_chat
from rig.fake_engine.faults import Faults
from rig.fake_engine.faulty import faulty_asked
from rig.fake_engine.generate import Generate
from rig.fake_engine.generation import Generation, Shape
from rig.fake_engine.plain import as_plain, refuse_unknown_fields
from rig.fake_engine.sampling import sample
from rig.fake_engine.writing import awkward_pieces, encode_payload, event

if TYPE_CHECKING:
    from rig.fake_engine.engine import FakeEngine

GENERATE, DERENDER = "/inference/v1/generate", "/v1/chat/completions/derender"
CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
LARGEST_BODY = 256 * 1024 * 1024


def create_app(engine: "FakeEngine") -> web.Application:
    app = web.Application(middlewares=[_watch(engine)], client_max_size=LARGEST_BODY)
    chat = Chat(engine.template, lambda: engine.takes_prompt_ids, engine.encode)
    shapes: dict[str, Shape] = {CHAT: chat, "/v1/completions": Completions(engine.model)}
    if engine.is_plain:
        add_plain_routes(app, engine)
    else:
        add_admin_routes(app, engine)
        if engine.scale_out:
            shapes[GENERATE] = Generate(engine.model)
            app.router.add_post(DERENDER, answering(engine, derender_chat))
            app.router.add_post(RENDER, answering(engine, lambda _, asked: {"token_ids": chat.render(asked[BODY])}))
        else:
            app.router.add_post(GENERATE, _closed)
            app.router.add_post(DERENDER, _closed)
            app.router.add_post(RENDER, _closed)
    for path, shape in shapes.items():
        app.router.add_post(path, _generation(engine, shape))
    return app


async def _closed(request: web.Request) -> web.StreamResponse:
    raise RefusedError(403, "PermissionDeniedError", "Scale-out endpoints are disabled.")


def _watch(engine: "FakeEngine") -> Middleware:
    """Remember what is asked, and answer refusals: the one place where they become HTTP."""

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            request[BODY] = _parsed(await request.read(), for_fake := request.path.startswith("/fake/"))
            if is_probe(request[BODY]) and "prompt" in request[BODY]:
                return json_response(engine.likeliest_token(request[BODY]["temperature"]))
            if not for_fake and not is_probe(request[BODY]):
                engine.note(request.method, request.path_qs, dict(request.headers), request[BODY])
            return await handler(request)
        except RefusedError as refused:
            return json_response(refused.payload(), status=refused.status)

    return watch


def is_probe(body: Json) -> bool:
    """A question for what the engine can do, and no call of an agent: it is not counted, and meets no faults."""
    return isinstance(body, dict) and body.get("user") == PROBE_USER


def _parsed(raw: bytes, for_fake: bool) -> Json:
    loads = json.loads if for_fake else orjson.loads  # a fault's value may be NaN, which orjson does not read
    try:
        body: Json = loads(raw) if raw else {}
    except ValueError as error:
        raise RefusedError(400, "Bad Request", f"JSON decode error: {error}", "body") from error
    return body


def _generation(engine: "FakeEngine", shape: Shape) -> Handler:
    async def generate(request: web.Request) -> web.StreamResponse:
        if engine.is_plain:
            refuse_unknown_fields(request.path, request[BODY])
        ask = fit(
            _parse(shape, request[BODY]),
            model=engine.model,
            max_model_len=engine.max_model_len,
            adapters=engine.adapters,
        )
        if is_probe(request[BODY]):
            return json_response(shape.answer(Generation(ask, Faults(), sample(ask, Faults(), [None]))))
        faults = engine.deal_faults()
        ask = faulty_asked(ask, faults)
        with _in_flight(engine):
            await engine.be_silent(faults.delay_s)
            if faults.hang_up:
                return _hang_up(web.StreamResponse(), request)
            if faults.error_status is not None:
                raise RefusedError(faults.error_status, "InternalServerError", "the fake engine was told to fail")
            generation = Generation(ask, faults, sample(ask, faults, engine.next_replies(ask.n)))
            send = _send_stream if ask.stream else _send_whole
            try:
                return await send(engine, shape, generation, request)
            finally:
                engine.note_end(generation)

    return generate


def _parse(shape: Shape, body: Json) -> Ask:
    """As vLLM's own shapes do, refuse what is of the wrong type."""
    try:
        return shape.parse(body)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RefusedError(400, "Bad Request", f"the request cannot be read: {error!r}", "body") from error


@contextlib.contextmanager
def _in_flight(engine: "FakeEngine") -> Iterator[None]:
    engine.in_flight += 1
    try:
        yield
    except (asyncio.CancelledError, ConnectionError):
        engine.disconnects += 1
        raise
    finally:
        engine.in_flight -= 1


async def _send_whole(
    engine: "FakeEngine", shape: Shape, generation: Generation, request: web.Request
) -> web.StreamResponse:
    async for _ in engine.ticks(generation):
        pass
    answer = shape.answer(generation)
    body = encode_payload(as_plain(answer) if engine.is_plain else answer, generation.faults)
    if generation.faults.disconnect_at_token is None:
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    return _hang_up(response, request)


async def _send_stream(
    engine: "FakeEngine", shape: Shape, generation: Generation, request: web.Request
) -> web.StreamResponse:
    stream = _Stream(engine, generation)
    await stream.response.prepare(request)
    for chunk in shape.opening(generation):
        await stream.send([chunk])
    chunks = [shape.chunks(generation, output) for output in generation.outputs]
    async for k in engine.ticks(generation):
        if k == generation.faults.disconnect_at_token:
            return _hang_up(stream.response, request)
        ready = (next(choice, None) for choice in chunks)
        await stream.send([chunk for chunk in ready if chunk is not None])
    return await stream.end(_ending(shape, generation))


class _Stream:
    """Server-sent events, with the faults of their sending."""

    def __init__(self, engine: "FakeEngine", generation: Generation) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._is_plain = engine.is_plain
        self._faults = generation.faults

    async def send(self, payloads: list[Json], *, then: bytes = b"") -> None:
        shown = map(as_plain, payloads) if self._is_plain else payloads
        await self._write(b"".join(event(payload, self._faults) for payload in shown) + then)

    async def end(self, payloads: list[Json]) -> web.StreamResponse:
        await self.send(payloads, then=b"" if self._faults.no_done else b"data: [DONE]\n\n")
        await self.response.write_eof()
        return self.response

    async def _write(self, data: bytes) -> None:
        if not self._faults.awkward_splits:
            await self.response.write(data)
            return
        for piece in awkward_pieces(data):
            await self.response.write(piece)
            await asyncio.sleep(0.001)  # lets each piece arrive by itself


def _ending(shape: Shape, generation: Generation) -> list[Json]:
    if any(output.finish_reason == "error" for output in generation.outputs):
        return [RefusedError(500, "InternalServerError", "Internal server error").payload()]
    return [shape.closing(generation)] if generation.ask.include_usage else []


def _hang_up(response: web.StreamResponse, request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response
