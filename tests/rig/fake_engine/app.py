"""The fake engine's HTTP: routes, the sending of answers, and the faults that are a matter of sending."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tests.rig.fake_engine.admin import BODY, add_admin_routes, json_response
from tests.rig.fake_engine.asking import Json, RefusedError, fit
from tests.rig.fake_engine.chat import Chat
from tests.rig.fake_engine.completions import Completions
from tests.rig.fake_engine.faults import Faults
from tests.rig.fake_engine.generate import Generate
from tests.rig.fake_engine.generation import Generation, Shape
from tests.rig.fake_engine.sampling import sample

if TYPE_CHECKING:
    from tests.rig.fake_engine.engine import FakeEngine

LARGEST_BODY = 256 * 1024 * 1024


def create_app(engine: "FakeEngine") -> web.Application:
    app = web.Application(middlewares=[_watch(engine)], client_max_size=LARGEST_BODY)
    shapes: dict[str, Shape] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/inference/v1/generate": Generate(engine.model),
    }
    for path, shape in shapes.items():
        app.router.add_post(path, _generation(engine, shape))
    add_admin_routes(app, engine)
    return app


def _watch(engine: "FakeEngine") -> Middleware:
    """Remember what is asked, and answer refusals: the one place where they become HTTP."""

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            request[BODY] = _parsed(await request.read(), for_fake := request.path.startswith("/fake/"))
            if not for_fake:
                engine.note(request.method, request.path_qs, dict(request.headers), request[BODY])
            return await handler(request)
        except RefusedError as refused:
            return json_response(refused.payload(), status=refused.status)

    return watch


def _parsed(raw: bytes, for_fake: bool) -> Json:
    loads = json.loads if for_fake else orjson.loads  # a fault's value may be NaN, which orjson does not read
    try:
        body: Json = loads(raw) if raw else {}
    except ValueError as error:
        raise RefusedError(400, "Bad Request", f"JSON decode error: {error}", "body") from error
    return body


def _generation(engine: "FakeEngine", shape: Shape) -> Handler:
    async def generate(request: web.Request) -> web.StreamResponse:
        faults = engine.deal_faults()
        ask = fit(shape.parse(request[BODY]), model=engine.model, max_model_len=engine.max_model_len)
        with _in_flight(engine):
            await asyncio.sleep(faults.delay_s)
            if faults.error_status is not None:
                raise RefusedError(faults.error_status, "InternalServerError", "the fake engine was told to fail")
            generation = Generation(ask, faults, sample(ask, faults, engine.next_replies(ask.n)))
            send = _send_stream if ask.stream else _send_whole
            return await send(engine, shape, generation, request)

    return generate


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
    body = _encode(shape.answer(generation), generation.faults)
    if generation.faults.disconnect_at_token is None:
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    return _hang_up(response, request)


async def _send_stream(
    engine: "FakeEngine", shape: Shape, generation: Generation, request: web.Request
) -> web.StreamResponse:
    faults = generation.faults
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in shape.opening(generation):
        await response.write(_event(chunk, faults))
    chunks = [shape.chunks(generation, output) for output in generation.outputs]
    async for k in engine.ticks(generation):
        if k == faults.disconnect_at_token:
            return _hang_up(response, request)
        await response.write(b"".join(_event(chunk, faults) for choice in chunks for chunk in _next(choice)))
    await response.write(_ending(shape, generation))
    await response.write_eof()
    return response


def _next(chunks: Iterator[Json]) -> Iterator[Json]:
    """The next chunk, or none where this choice has ended before the others."""
    chunk = next(chunks, None)
    if chunk is not None:
        yield chunk


def _ending(shape: Shape, generation: Generation) -> bytes:
    faults = generation.faults
    done = b"" if faults.no_done else b"data: [DONE]\n\n"
    if any(output.finish_reason == "error" for output in generation.outputs):
        return _event(RefusedError(500, "InternalServerError", "Internal server error").payload(), faults) + done
    usage = _event(shape.closing(generation), faults) if generation.ask.include_usage else b""
    return usage + done


def _hang_up(response: web.StreamResponse, request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response


def _event(chunk: Json, faults: Faults) -> bytes:
    return b"data: " + _encode(chunk, faults) + b"\n\n"


def _encode(payload: Json, faults: Faults) -> bytes:
    if faults.malformed == "no_choices":
        payload = {name: value for name, value in payload.items() if name != "choices"}
    encoded = orjson.dumps(payload)
    return encoded[: len(encoded) // 2] if faults.malformed == "not_json" else encoded
