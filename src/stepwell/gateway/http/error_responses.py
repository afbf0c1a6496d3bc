"""Failures, turned into HTTP answers in this one place, all in OpenAI's error shape."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from stepwell import errors

log = logging.getLogger("stepwell.gateway")

STATUS: dict[type[errors.StepwellError], int] = {
    errors.BadRequest: 400,
    errors.Forbidden: 401,
    errors.UnknownTrajectory: 404,
    errors.Conflict: 409,
    errors.TooLarge: 413,
    errors.PoolFull: 429,
    errors.Overloaded: 429,
    errors.EngineUnavailable: 502,
    errors.RewardFailed: 502,
    errors.NotReady: 503,
    errors.PoolUnavailable: 503,
}
RETRY_AFTER: dict[type[errors.StepwellError], str] = {errors.PoolFull: "5", errors.Overloaded: "1"}
"""Seconds: about as long as a trainer takes to make room, or an engine to end some calls."""
CONTEXT_OVERFLOW = "context_length_exceeded"
"""OpenAI's own code for a prompt that does not fit the model's window."""
HTTP_CODES = {404: "not_found", 413: errors.TooLarge.code()}
"""For failures that FastAPI tells by their status alone."""
JSON = "application/json"


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def explained(failure: errors.StepwellError) -> tuple[int, bytes, Mapping[str, str]]:
    """Status, body and headers that tell of a failure."""
    status = STATUS.get(type(failure), 500)
    headers = {"Retry-After": after} if (after := RETRY_AFTER.get(type(failure))) else {}
    return status, error_body(status, str(failure), failure.code()), headers


def refused(method: str, path: str, failure: errors.StepwellError) -> tuple[int, bytes, Mapping[str, str]]:
    """The same; what is no fault of the client's is logged."""
    status, body, headers = explained(failure)
    if status >= 500:
        log.warning("%s %s: %s", method, path, failure)
    return status, body, headers


def install(app: FastAPI) -> None:
    @app.exception_handler(errors.StepwellError)
    async def known(request: Request, failure: errors.StepwellError) -> Response:
        status, body, headers = refused(request.method, request.url.path, failure)
        return Response(body, status, headers, JSON)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, failure: RequestValidationError) -> Response:
        return _error(400, "; ".join(map(_fault, failure.errors())), errors.BadRequest.code())

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, failure: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {failure.detail}"
        return _error(failure.status_code, message, HTTP_CODES.get(failure.status_code, "http_error"))

    @app.exception_handler(Exception)
    async def unknown(request: Request, failure: Exception) -> Response:
        return _error(500, f"the gateway failed ({type(failure).__name__}); its log says more", "internal_error")


def relayed(status: int, body: bytes) -> Response:
    status, body = relayed_parts(status, body)
    return Response(body, status, media_type=JSON)


def relayed_parts(status: int, body: bytes) -> tuple[int, bytes]:
    """An engine's own answer. What is not JSON (a proxy's page, say) does not reach the agent as if it were."""
    if status < 300:
        return status, body
    try:
        error = orjson.loads(body)["error"]
        message = str(error["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        text = f"the engine answered {status} without an error object"
        return 502, error_body(502, text, errors.EngineUnavailable.code())
    if status == 400 and is_context_overflow(error):
        return 400, error_body(400, message, CONTEXT_OVERFLOW, "messages")
    if status in (401, 403):
        text = f"the engine does not accept this gateway's key ({status}); see --engine-key"
        return 502, error_body(502, text, errors.EngineUnavailable.code())
    return status, body


def is_context_overflow(error: Mapping[str, Any]) -> bool:
    told = (error.get("code"), error.get("param"))
    return CONTEXT_OVERFLOW in told or "input_tokens" in told or "maximum context length" in str(error.get("message"))


def _error(status: int, message: str, code: str) -> Response:
    return Response(error_body(status, message, code), status, media_type=JSON)


def _fault(error: Mapping[str, Any]) -> str:
    where: Sequence[Any] = error["loc"][1:]
    return f"{'.'.join(map(str, where))}: {error['msg']}"
