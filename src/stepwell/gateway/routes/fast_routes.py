"""The two calls that every rollout begins and ends with, ahead of FastAPI: it would cost more than all they do.

What always holds: no caller can tell the difference. A request that cannot be taken as it stands goes on to FastAPI,
which has the same calls and knows how to refuse them.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp

from stepwell.errors import StepwellError
from stepwell.gateway.agent_calls import Receive
from stepwell.gateway.http.error_responses import JSON, refused
from stepwell.gateway.http.response_writer import Headers, Message, ResponseWriter, Send
from stepwell.gateway.rollouts import TrajectoryLifecycle
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.wire import gateway_api as shapes

Asked = Awaitable[shapes.GatewayBody]
Call = Callable[[Message, bytes], Asked]
S = TypeVar("S", bound=shapes.GatewayBody)

OPENING = "/init_trajectory"
COMPLETING = re.compile(rf"/(?!v1/){shapes.UID_PATTERN}/{shapes.UID_PATTERN}(?:/v1){{0,2}}/complete_trajectory")


class FastRoutes:
    """Middleware of the application that has all calls."""

    def __init__(self, app: ASGIApp, rollouts: TrajectoryLifecycle) -> None:
        self._app = app
        self._rollouts = rollouts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif scope["path"] == OPENING:
            await self._serve(scope, receive, send, self._opening)
        elif COMPLETING.fullmatch(scope["path"]):
            await self._serve(scope, receive, send, self._completing)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Message, receive: Receive, send: Send, call: Call) -> None:
        message = await receive()
        body = _whole_body(scope["headers"], message)
        try:
            asked = None if body is None else call(scope, body)
        except ValidationError:
            asked = None
        if asked is None:
            await self._app(scope, _after(message, receive), send)
        else:
            await _answer(scope, send, asked)

    def _opening(self, scope: Message, body: bytes) -> Asked:
        wanted = _shaped(shapes.InitTrajectory, body)
        return self._rollouts.open(wanted, str(Request(scope).base_url))

    def _completing(self, scope: Message, body: bytes) -> Asked:
        wanted = _shaped(shapes.CompleteTrajectory, body)
        _, trajectory_uid, prompt_uid, _ = scope["path"].split("/", 3)
        return self._rollouts.complete(TrajectoryRef(trajectory_uid, prompt_uid), wanted)


async def _answer(scope: Message, send: Send, asked: Asked) -> None:
    answer = ResponseWriter(send, float)
    try:
        given = await asked
    except StepwellError as failure:
        await answer.whole(*refused(scope["method"], scope["path"], failure))
    else:
        await answer.whole(200, given.model_dump_json().encode())


def _shaped(shape: type[S], body: bytes) -> S:
    return shape.model_validate_json(body) if body else shape()


def _whole_body(headers: Headers, message: Message) -> bytes | None:
    """None where there is more to come, or where it does not say that it is JSON."""
    if message["type"] != "http.request" or message.get("more_body"):
        return None
    body: bytes = message.get("body", b"")
    return body if not body or _kind(headers) == JSON.encode() else None


def _kind(headers: Headers) -> bytes:
    named = next((value for name, value in headers if name == b"content-type"), b"")
    return named.partition(b";")[0].strip().lower()


def _after(message: Message, receive: Receive) -> Receive:
    """`message`, which was received already, and then the others."""
    waiting = [message]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
