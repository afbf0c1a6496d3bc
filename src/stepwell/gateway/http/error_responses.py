"""Failures as HTTP responses. This is the only place that decides a failure's status.

The body is written by the dialect of the call. Routes that belong to no dialect use OpenAI's error object.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from stepwell import errors
from stepwell.common import listening as cross_site
from stepwell.common.user_input import dotted, explain_all
from stepwell.wire.openai import write_object

log = logging.getLogger("stepwell.gateway")

STATUS: dict[type[errors.StepwellError], int] = {
    errors.BadRequest: 400,
    errors.PreviousResponseNotFound: 400,
    errors.Forbidden: 401,
    errors.NotPermitted: 403,
    errors.UnknownTrajectory: 404,
    errors.UnknownAddress: 404,
    errors.ModelNotFound: 404,
    errors.Conflict: 409,
    errors.Forgotten: 410,
    errors.TooLarge: 413,
    errors.PoolFull: 429,
    errors.Overloaded: 429,
    errors.EngineUnavailable: 502,
    errors.RewardFailed: 502,
    errors.NotReady: 503,
    errors.PoolUnavailable: 503,
    **cross_site.STATUS,
}
RETRY_AFTER: dict[type[errors.StepwellError], str] = {errors.PoolFull: "5", errors.Overloaded: "1"}
"""Seconds: about as long as a trainer takes to make room, or an engine to end some calls."""
CONTEXT_OVERFLOW = "context_length_exceeded"
"""OpenAI's code for a prompt that is longer than the model's context."""
HTTP_CODES = {404: "not_found", 413: errors.TooLarge.code()}
"""Codes of failures that FastAPI tells by their status alone."""
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """A failure as the caller sees it."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] | None = None
    openai_body: bytes | None = None
    """The engine's own error in OpenAI's form, if the failure is the engine's."""


def openai_error(error: ErrorDetails) -> bytes:
    """OpenAI's error object; the engine's own if there is one."""
    if error.openai_body is not None:
        return error.openai_body
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": body})


def describe(failure: Exception) -> ErrorDetails:
    """The details of any exception. What Stepwell did not foresee is an internal error without its text."""
    if not isinstance(failure, errors.StepwellError):
        text = f"the gateway failed ({type(failure).__name__}); its log says more"
        return ErrorDetails(500, text, "internal_error")
    after = RETRY_AFTER.get(type(failure))
    headers = {"Retry-After": after} if after else None
    return ErrorDetails(STATUS.get(type(failure), 500), str(failure), failure.code(), headers=headers)


def describe_unforeseen(failure: Exception, what: str) -> ErrorDetails:
    """The same. If Stepwell did not foresee the failure, the log gets its traceback; `what` failed."""
    if not isinstance(failure, errors.StepwellError):
        log.error("%s failed", what, exc_info=failure)
    return describe(failure)


def describe_logged(failure: errors.StepwellError, what: str) -> ErrorDetails:
    """The same, and a log line if the failure is not the client's fault."""
    error = describe(failure)
    if error.status >= 500:
        log.warning("%s: %s", what, failure)
    return error


def describe_refusal(status: int, body: bytes) -> ErrorDetails:
    """The details of an engine's response that is not a success. A body that is not an error object is not shown."""
    try:
        error = orjson.loads(body)["error"]
        message = str(error["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        text = f"the engine answered {status} without an error object"
        return ErrorDetails(502, text, errors.EngineUnavailable.code())
    if status == 400 and is_context_overflow(error):
        return ErrorDetails(400, message, CONTEXT_OVERFLOW, "messages")
    if status in (401, 403):
        text = f"the engine does not accept this gateway's key ({status}); see --engine-key"
        return ErrorDetails(502, text, errors.EngineUnavailable.code())
    return ErrorDetails(status, message, str(error.get("code")), openai_body=body)


def describe_stream_error(chunk: dict[str, Any]) -> ErrorDetails:
    """The details of an error that an engine sent within a stream."""
    error = chunk["error"]
    message = error.get("message") if isinstance(error, dict) else error
    return ErrorDetails(502, str(message), errors.EngineUnavailable.code(), openai_body=write_object(chunk, "stream"))


def is_context_overflow(error: Mapping[str, Any]) -> bool:
    named = (error.get("code"), error.get("param"))
    return CONTEXT_OVERFLOW in named or "input_tokens" in named or "maximum context length" in str(error.get("message"))


def relay(status: int, body: bytes) -> Response:
    """An engine's response, for routes that belong to no dialect."""
    if status < 300:
        return Response(body, status, media_type=JSON)
    return error_response(describe_refusal(status, body))


def error_response(error: ErrorDetails) -> Response:
    return Response(openai_error(error), error.status, error.headers, JSON)


def install(app: FastAPI) -> None:
    @app.exception_handler(errors.StepwellError)
    async def known(request: Request, failure: errors.StepwellError) -> Response:
        return error_response(describe_logged(failure, f"{request.method} {request.url.path}"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, failure: RequestValidationError) -> Response:
        message = explain_all(failure.errors(), lambda place: dotted(place[1:]))
        return error_response(ErrorDetails(400, message, errors.BadRequest.code()))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, failure: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {failure.detail}"
        code = HTTP_CODES.get(failure.status_code, "http_error")
        return error_response(ErrorDetails(failure.status_code, message, code))

    @app.exception_handler(Exception)
    async def unknown(_: Request, failure: Exception) -> Response:
        return error_response(describe(failure))  # Starlette raises it again, and uvicorn logs it
