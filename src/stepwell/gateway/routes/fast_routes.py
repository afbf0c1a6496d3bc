"""The first and the last call of every rollout, served without FastAPI, which would cost more than they do.

No caller can tell the difference: a request that is not plain JSON of the right shape is passed on to FastAPI, which
has the same routes and writes the error.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

from stepwell.access.caller import caller_of
from stepwell.access.route_table import ANY_V1
from stepwell.errors import StepwellError, TooLarge
from stepwell.gateway.calls import send_error
from stepwell.gateway.error_responses import JSON, describe, describe_logged
from stepwell.gateway.requests import Headers, Message, Receive, Send
from stepwell.gateway.response_writer import ResponseWriter
from stepwell.gateway.routes.trajectory_routes import open_as_asked
from stepwell.gateway.trajectory_lifecycle import TrajectoryLifecycle
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS
from stepwell.wire import gateway_api
from stepwell.wire.gateway_api import UID_PATTERN, GatewayBody

Answering: TypeAlias = Awaitable[GatewayBody]
Handler: TypeAlias = Callable[[Message, bytes], Answering]

OPEN_PATH = "/init_trajectory"
COMPLETE_PATH = re.compile(
    rf"/(?!(?:{'|'.join(RESERVED_UIDS)})/){UID_PATTERN}/{UID_PATTERN}{ANY_V1}/complete_trajectory"
)


class FastRoutes:
    """Middleware of the application that has all routes."""

    def __init__(self, app: ASGIApp, lifecycle: TrajectoryLifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif scope["path"] == OPEN_PATH:
            await self._serve(scope, receive, send, self._open)
        elif COMPLETE_PATH.fullmatch(scope["path"]):
            await self._serve(scope, receive, send, self._complete)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Message, receive: Receive, send: Send, handler: Handler) -> None:
        try:
            message = await receive()
        except HTTPException as refused:  # by `limited`, for FastAPI
            await send_error(ResponseWriter(send, float), None, describe(TooLarge(refused.detail)))
            return
        body = _json_body(scope["headers"], message)
        try:
            answering = None if body is None else handler(scope, body)
        except ValidationError:
            answering = None
        if answering is None:
            await self._app(scope, _receive_again(message, receive), send)
        else:
            await _answer(scope, send, answering)

    def _open(self, scope: Message, body: bytes) -> Answering:
        wanted = gateway_api.InitTrajectory.model_validate_json(body or b"{}")
        return open_as_asked(self._lifecycle, wanted, Request(scope))

    def _complete(self, scope: Message, body: bytes) -> Answering:
        wanted = gateway_api.CompleteTrajectory.model_validate_json(body or b"{}")
        _, trajectory_uid, prompt_uid, _ = scope["path"].split("/", 3)
        return self._lifecycle.complete(TrajectoryRef(trajectory_uid, prompt_uid), wanted, caller_of(scope))


async def _answer(scope: Message, send: Send, answering: Answering) -> None:
    writer = ResponseWriter(send, float)
    try:
        answer = await answering
    except StepwellError as failure:
        error = describe_logged(failure, f"{scope['method']} {scope['path']}")
        await send_error(writer, None, error)
    else:
        await writer.whole(200, answer.model_dump_json().encode())


def _json_body(headers: Headers, message: Message) -> bytes | None:
    """None if more parts follow, or if the request does not say that it is JSON."""
    if message["type"] != "http.request" or message.get("more_body"):
        return None
    body: bytes = message.get("body", b"")
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    return body if not body or content_type.partition(b";")[0].strip().lower() == JSON.encode() else None


def _receive_again(message: Message, receive: Receive) -> Receive:
    """`message`, which was already received, and then the others."""
    waiting = [message]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
