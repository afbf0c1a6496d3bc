"""The fake engine's small routes: those of vLLM around a generation, and those by which another process drives it."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, get_args

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from rig.fake_engine.asking import Json, PauseMode, RefusedError, required
from rig.fake_engine.faults import Faults
from rig.fake_engine.plain import as_plain
from rig.vocabulary import pieces, token_name

if TYPE_CHECKING:
    from rig.fake_engine.engine import FakeEngine

BODY = web.RequestKey("body", dict)
"""A request's JSON, which the middleware has parsed; empty where it had none."""

Answer = Callable[["FakeEngine", web.Request], Json]


def add_plain_routes(app: web.Application, engine: "FakeEngine") -> None:
    app.router.add_get("/v1/models", answering(engine, _models))
    app.router.add_get("/fake/state", answering(engine, _state))
    app.router.add_put("/fake/faults", answering(engine, _put_faults))


def add_admin_routes(app: web.Application, engine: "FakeEngine") -> None:
    add_plain_routes(app, engine)
    app.router.add_get("/health", _health(engine))
    app.router.add_post("/pause", _pausing(engine))
    app.router.add_get("/version", answering(engine, _version))
    app.router.add_get("/weight_info", _asking_core(engine, _weight_info))
    app.router.add_get("/is_paused", _asking_core(engine, _is_paused))
    for path, answer in POSTS.items():
        app.router.add_post(path, answering(engine, answer))


def answering(engine: "FakeEngine", answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return json_response(answer(engine, request))

    return handler


def json_response(payload: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), content_type="application/json", status=status)


def _health(engine: "FakeEngine") -> Handler:
    async def health(request: web.Request) -> web.Response:
        return web.Response(status=engine.health_status)

    return health


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
    return {"object": "list", "data": [as_plain(card) if engine.is_plain else card]}


def _version(engine: "FakeEngine", request: web.Request) -> Json:
    return {"version": engine.version}


def _asking_core(engine: "FakeEngine", answer: Answer) -> Handler:
    """What vLLM's API server asks its engine core for, which does not listen while it loads weights."""

    async def handler(request: web.Request) -> web.Response:
        await engine.listens.wait()
        return json_response(answer(engine, request))

    return handler


def _weight_info(engine: "FakeEngine", request: web.Request) -> Json:
    return {"weight_version": engine.weight_version}


def _is_paused(engine: "FakeEngine", request: web.Request) -> Json:
    return {"is_paused": engine.is_paused}


def _pausing(engine: "FakeEngine") -> Handler:
    """Answers, as vLLM does, once what was in flight has ended, unless it is kept. `clear_cache` changes nothing."""

    async def pause(request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise RefusedError(400, "Bad Request", f"mode must be one of {get_args(PauseMode)}", "query.mode")
        engine.pause(mode)  # type: ignore[arg-type]
        if mode != "keep":
            await engine.drained()
        return json_response({"status": "paused"})

    return pause


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


def _detokenize(engine: "FakeEngine", request: web.Request) -> Json:
    """Control tokens are spelled too."""
    body: Json = request[BODY]
    ids = required(body, "tokens")
    return {"prompt": "".join(token_name(*token) for token in zip(ids, pieces(ids), strict=True))}


def _tokenize(engine: "FakeEngine", request: web.Request) -> Json:
    body: Json = request[BODY]
    ids = [*engine.tokenizes_first, *engine.rendered(body)]
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": None}


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


POSTS: dict[str, Answer] = {
    "/detokenize": _detokenize,
    "/tokenize": _tokenize,
    "/resume": _resume,
    "/update_weight_version": _update_weight_version,
    "/collective_rpc": _collective_rpc,
    "/reset_prefix_cache": _reset_prefix_cache,
}
