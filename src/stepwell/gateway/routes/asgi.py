"""The gateway's outermost layer: it checks origin, size and key of a request before anything else reads it.

Model calls go straight to AgentCalls; FastAPI serves the rest. No client's path becomes a path at an engine.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from fastapi import FastAPI
from starlette.datastructures import URL

from stepwell.access.caller import Caller
from stepwell.access.route_table import ANY_V1, MODELS, ROOTS, UNRECORDED_ROOTS, Route
from stepwell.common.bounded_http import LARGEST_HEADERS
from stepwell.common.cross_site import CrossSiteCheck
from stepwell.errors import StepwellError, TooLarge, UnknownAddress
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.dialects import side_calls
from stepwell.gateway.dialects.dialect import Dialect
from stepwell.gateway.exchange import send_error
from stepwell.gateway.http.error_responses import describe
from stepwell.gateway.http.request_body import (
    LARGEST_BODY,
    Headers,
    Message,
    Receive,
    Send,
    limited,
    too_large_text,
)
from stepwell.gateway.http.response_writer import ResponseWriter
from stepwell.gateway.routes.access import AccessCheck, call_paths
from stepwell.gateway.token_counts import TokenCounts
from stepwell.gateway.unrecorded_calls import NO_TRAJECTORY
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS
from stepwell.wire.gateway_api import UID_PATTERN

ATROPOS_PREFIX = "/atropos"
SESSION_BODY = 64 * 2**10
"""Bytes of a body by which the holder of a session key opens a session."""
CALL_HEADER = side_calls.CALL_HEADER.encode()


class MountedApp(Protocol):
    """Another application below ATROPOS_PREFIX, which checks keys and origins by itself."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None: ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Open while it serves."""


class GatewayAsgi:
    """The ASGI application."""

    def __init__(
        self,
        app: FastAPI,
        calls: AgentCalls,
        counts: TokenCounts,
        access: AccessCheck,
        dialects: Sequence[Dialect],
        atropos: MountedApp | None = None,
        *,
        cross_site: CrossSiteCheck | None = None,
        largest_body: int = LARGEST_BODY,
    ) -> None:
        self.app = app
        self._calls = calls
        self._counts = counts
        self._access = access
        self._atropos = atropos
        self._cross_site = cross_site or CrossSiteCheck()
        self._largest_body = largest_body
        self._dialects = {path: dialect for dialect in dialects for path in call_paths(dialect)}
        paths = "|".join(map(re.escape, self._dialects))
        trajectory = rf"/(?!(?:{'|'.join(RESERVED_UIDS)})/)({UID_PATTERN})/({UID_PATTERN}){ANY_V1}"
        others = f"({'|'.join(UNRECORDED_ROOTS)})|{'|'.join(ROOTS)}"
        self._model_call = re.compile(rf"(?:{trajectory}|{others})/({paths})")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if self._atropos is not None and (path + "/").startswith(f"{ATROPOS_PREFIX}/"):
            await self._atropos({**scope, "path": path.removeprefix(ATROPOS_PREFIX)}, receive, send)
            return
        call = self._model_call.fullmatch(path)
        dialect = self._dialects.get(call[4] if call else path[1:])
        try:
            self._cross_site.check(scope["method"], scope["headers"])
            if call is None and (dialect is not None or path == f"/{MODELS}"):
                raise UnknownAddress(
                    f"the path {path} lacks {ROOTS[0]}: the base_url of this gateway is {_address(scope)}{ROOTS[0]}"
                )
            route, caller = self._check(scope)
        except StepwellError as failure:
            await send_error(ResponseWriter(send, float), dialect, describe(failure))
            return
        if call and dialect and scope["method"] == "POST":
            ref = TrajectoryRef(call[1], call[2]) if call[1] else NO_TRAJECTORY
            if (counter := dialect.token_counter) is not None and counter.path == call[4]:
                await self._counts.serve(scope, receive, send, ref, dialect, counter, caller)
            else:
                is_whitebox = call[3] is not None
                await self._calls.serve(scope, receive, send, ref, dialect, caller, is_whitebox=is_whitebox)
        else:
            largest = self._largest_body if caller.session is None else min(self._largest_body, SESSION_BODY)
            limited_receive = limited(receive, largest)
            await self._access.guard.serve(self.app, route, caller, scope, limited_receive, send)

    def _check(self, scope: Message) -> tuple[Route, Caller]:
        """What is asked for, and who asks. An agent's CALL_HEADER is removed: it must not say which of its steps are
        trained."""
        headers: Headers = scope["headers"]
        authorization, api_key, size, length, is_marked = None, None, 0, b"0", False
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"authorization":
                authorization = value
            elif name == b"x-api-key":
                api_key = value
            elif name == b"content-length":
                length = value
            elif name == CALL_HEADER:
                is_marked = True
        if size > LARGEST_HEADERS:
            raise TooLarge(f"the request's headers are larger than {LARGEST_HEADERS >> 10} KiB")
        admitted = self._access.admit(scope, authorization, api_key)
        if is_marked and not self._access.may_mark(authorization, api_key):
            headers[:] = [header for header in headers if header[0] != CALL_HEADER]
        if int(length) > self._largest_body:
            raise TooLarge(too_large_text(self._largest_body))
        return admitted


def _address(scope: Message) -> str:
    """The gateway's own address, as the client of that request knows it."""
    return str(URL(scope=scope).replace(path="", query=""))
