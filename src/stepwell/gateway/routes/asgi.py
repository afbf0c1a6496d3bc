"""The gateway's outermost layer: sizes and keys are checked here, before anything else looks at a request.

An agent's calls go straight to calls.py; FastAPI serves the rest. No client's path ever becomes a path at an engine.
"""

import re
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from stepwell.common.access_keys import AccessKeys
from stepwell.errors import Forbidden, StepwellError, TooLarge
from stepwell.gateway.agent_calls import LARGEST_BODY, TOO_LARGE, AgentCalls, Receive
from stepwell.gateway.dialects.dialect import Kind
from stepwell.gateway.http.response_writer import Headers, Message, ResponseWriter, Send
from stepwell.gateway.routes.access import REFUSALS, missing
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.wire.gateway_api import UID_PATTERN

LARGEST_HEADERS = 64 * 1024
AGENT_CALL = re.compile(rf"/(?!v1/)({UID_PATTERN})/({UID_PATTERN})(?:/v1){{0,2}}/(chat/completions|completions)")
KINDS = {"chat/completions": Kind.CHAT, "completions": Kind.COMPLETIONS}


ATROPOS_PREFIX = "/atropos"


class MountedApp(Protocol):
    """Another application below ATROPOS_PREFIX, which asks for keys by itself."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None: ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Open while it serves."""


class GatewayAsgi:
    """The ASGI application."""

    def __init__(self, app: FastAPI, calls: AgentCalls, keys: AccessKeys, atropos: MountedApp | None = None) -> None:
        self.app = app
        self._calls = calls
        self._keys = keys
        self._atropos = atropos

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._atropos is not None and (scope["path"] + "/").startswith(f"{ATROPOS_PREFIX}/"):
            await self._atropos({**scope, "path": scope["path"].removeprefix(ATROPOS_PREFIX)}, receive, send)
            return
        below = AGENT_CALL.fullmatch(scope["path"])
        try:
            self._check(scope["path"], scope["headers"])
        except StepwellError as failure:
            await ResponseWriter(send, float).fail(failure)
            return
        if below and scope["method"] == "POST":
            await self._calls.serve(scope, receive, send, TrajectoryRef(below[1], below[2]), KINDS[below[3]])
        else:
            await self.app(scope, _bounded(receive), send)

    def _check(self, path: str, headers: Headers) -> None:
        authorization, size, length = None, 0, b"0"
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = value
        if size > LARGEST_HEADERS:
            raise TooLarge(f"the request's headers are larger than {LARGEST_HEADERS >> 10} KiB")
        if (needed := missing(self._keys, path, authorization)) is not None:
            raise Forbidden(REFUSALS[needed])
        if int(length) > LARGEST_BODY:
            raise TooLarge(TOO_LARGE)


def _bounded(receive: Receive) -> Receive:
    """`receive`, which refuses a body that is too large, in the one way that FastAPI does not take for bad JSON."""
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > LARGEST_BODY:
            raise HTTPException(413, TOO_LARGE)
        return message

    return bounded
