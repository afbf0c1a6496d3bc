"""The fake engine's small routes: those of vLLM around a generation, and those by which another process drives it."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from tests.rig.fake_engine.asking import Json, RefusedError, required
from tests.rig.fake_engine.faults import Faults

if TYPE_CHECKING:
    from tests.rig.fake_engine.engine import FakeEngine

BODY = web.RequestKey("body", dict)
"""A request's JSON, which the middleware has parsed; empty where it had none."""

Answer = Callable[["FakeEngine", web.Request], Json]


def add_admin_routes(app: web.Application, engine: "FakeEngine") -> None:
    app.router.add_get("/health", _health)
    for path, answer in GETS.items():
        app.router.add_get(path, _answering(engine, answer))
    for path, answer in POSTS.items():
        app.router.add_post(path, _answering(engine, answer))
    app.router.add_put("/fake/faults", _answering(engine, _put_faults))


def _answering(engine: "FakeEngine", answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return json_response(answer(engine, request))

    return handler


def json_response(payload: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), content_type="application/json", status=status)


async def _health(request: web.Request) -> web.Response:
    return web.Response()


def _models(engine: "FakeEngine", request: web.Request) -> Json:
    card = {
        "id": engine.model,
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": engine.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [],
    }
    return {"object": "list", "data": [card]}


def _version(engine: "FakeEngine", request: web.Request) -> Json:
    return {"version": "0.32.0"}


def _weight_info(engine: "FakeEngine", request: web.Request) -> Json:
    return {"weight_version": engine.weight_version}


def _is_paused(engine: "FakeEngine", request: web.Request) -> Json:
    return {"is_paused": engine.is_paused}


def _pause(engine: "FakeEngine", request: web.Request) -> Json:
    if request.query.get("mode") != "keep":
        raise RefusedError(400, "BadRequestError", "the fake engine knows only mode=keep", "mode")
    engine.pause()
    return {"status": "paused"}


def _resume(engine: "FakeEngine", request: web.Request) -> Json:
    engine.resume()
    return {"status": "resumed"}


def _update_weight_version(engine: "FakeEngine", request: web.Request) -> Json:
    body: Json = request[BODY]
    engine.weight_version = required(body, "new_version")
    return {"success": True, "new_version": engine.weight_version}


def _collective_rpc(engine: "FakeEngine", request: web.Request) -> Json:
    """Takes any call and does nothing: there are no weights; a test looks at what was asked for."""
    return {"results": [None]}


def _reset_prefix_cache(engine: "FakeEngine", request: web.Request) -> Json:
    return {"success": True}


def _put_faults(engine: "FakeEngine", request: web.Request) -> Json:
    body: Json = request[BODY]
    if unknown := body.keys() - {field.name for field in dataclasses.fields(Faults)}:
        raise RefusedError(400, "BadRequestError", f"no such faults: {sorted(unknown)}")
    engine.faults = Faults(**body)
    return dataclasses.asdict(engine.faults)


def _state(engine: "FakeEngine", request: web.Request) -> Json:
    return {
        "requests": engine.request_count,
        "in_flight": engine.in_flight,
        "disconnects": engine.disconnects,
        "faults": dataclasses.asdict(engine.faults),
    }


GETS: dict[str, Answer] = {
    "/v1/models": _models,
    "/version": _version,
    "/weight_info": _weight_info,
    "/is_paused": _is_paused,
    "/fake/state": _state,
}
POSTS: dict[str, Answer] = {
    "/pause": _pause,
    "/resume": _resume,
    "/update_weight_version": _update_weight_version,
    "/collective_rpc": _collective_rpc,
    "/reset_prefix_cache": _reset_prefix_cache,
}
