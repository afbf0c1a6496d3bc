"""Failures, turned into HTTP answers in this one place, all in OpenAI's error shape."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from stepwell import errors

log = logging.getLogger("stepwell.gateway")

STATUS: dict[type[errors.StepwellError], int] = {
    errors.BadRequest: 400,
    errors.UnknownTrajectory: 404,
    errors.Conflict: 409,
    errors.PoolFull: 429,
    errors.EngineUnavailable: 502,
    errors.RewardFailed: 502,
    errors.NotReady: 503,
    errors.PoolUnavailable: 503,
}
RETRY_AFTER = "5"
"""Seconds; about as long as a trainer takes to make room."""


def error_answer(status: int, message: str, code: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def install(app: FastAPI) -> None:
    @app.exception_handler(errors.StepwellError)
    async def known(request: Request, failure: errors.StepwellError) -> JSONResponse:
        status = STATUS.get(type(failure), 500)
        if status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, failure)
        answer = error_answer(status, str(failure), failure.code())
        if status == 429:
            answer.headers["Retry-After"] = RETRY_AFTER
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, failure: RequestValidationError) -> JSONResponse:
        faults = (f"{'.'.join(str(part) for part in e['loc'][1:])}: {e['msg']}" for e in failure.errors())
        return error_answer(400, "; ".join(faults), errors.BadRequest.code())

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, failure: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {failure.detail}"
        return error_answer(failure.status_code, message, "not_found" if failure.status_code == 404 else "http_error")

    @app.exception_handler(Exception)
    async def unknown(request: Request, failure: Exception) -> JSONResponse:
        return error_answer(500, f"the gateway failed ({type(failure).__name__}); its log says more", "internal_error")


def relayed(status: int, body: bytes) -> Response:
    """An engine's own answer. What is not JSON (a proxy's page, say) does not reach the agent as if it were."""
    if status < 400 or body.lstrip().startswith(b"{"):
        return Response(body, status, media_type="application/json")
    return error_answer(502, f"the engine answered {status} without an error object", errors.EngineUnavailable.code())
