"""The gateway's outermost layer: it checks origin, size and key of a request before anything else reads it.

Model calls go straight to AgentCalls; FastAPI serves the rest. No client's path becomes a path at an engine.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol
from urllib.parse import parse_qsl

from fastapi import FastAPI
from starlette.datastructures import URL

from stepwell.access.access_keys import BEARER
from stepwell.access.caller import Caller
from stepwell.access.route_table import ANY_V1, MODELS, ROOTS, UNRECORDED_ROOTS, Route
from stepwell.common.bounded_http import LARGEST_HEADERS
from stepwell.common.listening import CrossSiteCheck
from stepwell.errors import BadRequest, StepwellError, TooLarge, UnknownAddress
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.asgi import AccessCheck, call_paths
from stepwell.gateway.calls import NO_TRAJECTORY, RequestedCall, send_error
from stepwell.gateway.dialects import side_calls
from stepwell.gateway.dialects.dialect import PLACE, Dialect
from stepwell.gateway.error_responses import describe
from stepwell.gateway.requests import (
    LARGEST_BODY,
    CallUrl,
    Headers,
    Message,
    Receive,
    Send,
    limited,
    too_large_text,
)
from stepwell.gateway.response_writer import ResponseWriter
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS
from stepwell.wire.gateway_api import UID_PATTERN

ATROPOS_PREFIX = "/atropos"
SESSION_BODY = 64 * 2**10
"""Bytes of a body by which the holder of a session key opens a session."""
AUTHORIZATION = b"authorization"
CALL_HEADER = side_calls.CALL_HEADER.encode()
MOST_PARAMETERS = 100
"""Parameters of a query."""


class CallPaths:
    """The paths of all dialects' calls, below a trajectory and below the other roots."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        of_dialects = [(path, dialect) for dialect in dialects for path in call_paths(dialect)]
        self._plain = {path: (dialect, CallUrl(path, path)) for path, dialect in of_dialects if "{" not in path}
        self._templates = [
            (re.compile(_pattern(path, named=True)), path, dialect) for path, dialect in of_dialects if "{" in path
        ]
        paths = "|".join(_pattern(path, named=False) for path, _ in of_dialects)
        trajectory = rf"/(?!(?:{'|'.join(RESERVED_UIDS)})/)({UID_PATTERN})/({UID_PATTERN}){ANY_V1}"
        others = f"({'|'.join(UNRECORDED_ROOTS)})|{'|'.join(ROOTS)}"
        self._model_call = re.compile(rf"(?:{trajectory}|{others})/({paths})")

    def find(self, path: str) -> RequestedCall | None:
        """None if the path is no model call's."""
        match = self._model_call.fullmatch(path)
        if match is None:
            return None
        trajectory_uid, prompt_uid, unrecorded, call = match.groups()
        found = self._plain.get(call) or self._find(call)
        if found is None:
            return None
        dialect, url = found
        ref = TrajectoryRef(trajectory_uid, prompt_uid) if trajectory_uid else NO_TRAJECTORY
        route = path.removesuffix(call) + url.path if url.names else path
        return RequestedCall(ref, dialect, url, unrecorded is not None, route)

    def dialect_at(self, path: str) -> Dialect | None:
        """The dialect that has this path below a base_url."""
        found = self._find(path)
        return None if found is None else found[0]

    def _find(self, path: str) -> tuple[Dialect, CallUrl] | None:
        if (found := self._plain.get(path)) is not None:
            return found
        for pattern, template, dialect in self._templates:
            if (match := pattern.fullmatch(path)) is not None:
                return dialect, CallUrl(template, path, match.groupdict())
        return None


def _pattern(template: str, *, named: bool) -> str:
    """The regular expression of a path template, with or without groups."""
    parts, end = [], 0
    for place in PLACE.finditer(template):
        what = ".+" if place[2] else "[^/]+"
        parts += [re.escape(template[end : place.start()]), f"(?P<{place[1]}>{what})" if named else what]
        end = place.end()
    return "".join((*parts, re.escape(template[end:])))


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
        access: AccessCheck,
        dialects: Sequence[Dialect],
        atropos: MountedApp | None = None,
        *,
        cross_site: CrossSiteCheck | None = None,
        largest_body: int = LARGEST_BODY,
    ) -> None:
        self.app = app
        self._calls = calls
        self._access = access
        self._atropos = atropos
        self._cross_site = cross_site or CrossSiteCheck()
        self._largest_body = largest_body
        self._paths = CallPaths(dialects)
        self._key_headers = tuple({dialect.key_header for dialect in dialects} - {AUTHORIZATION})
        """Headers that may have a bare key."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if self._atropos is not None and (path + "/").startswith(f"{ATROPOS_PREFIX}/"):
            await self._atropos({**scope, "path": path.removeprefix(ATROPOS_PREFIX)}, receive, send)
            return
        call = self._paths.find(path)
        dialect = self._paths.dialect_at(path[1:]) if call is None else call.dialect
        try:
            self._cross_site.check(scope["method"], scope["headers"])
            if call is None and (dialect is not None or path == f"/{MODELS}"):
                raise UnknownAddress(
                    f"the path {path} lacks {ROOTS[0]}: the base_url of this gateway is {_address(scope)}{ROOTS[0]}"
                )
            if call is not None and (query := scope.get("query_string")):
                call = call._replace(url=_with_query(call.url, query.decode("latin-1")))
            route, caller = self._check(scope, path if call is None else call.route)
        except StepwellError as failure:
            await send_error(ResponseWriter(send, float), dialect, describe(failure))
            return
        if call is not None and scope["method"] == "POST":
            if (counter := call.dialect.token_counter) is not None and counter.path == call.url.path:
                await self._calls.count_tokens(scope, receive, send, call, counter, caller)
            else:
                await self._calls.serve(scope, receive, send, call, caller)
        else:
            largest = self._largest_body if caller.session is None else min(self._largest_body, SESSION_BODY)
            limited_receive = limited(receive, largest)
            await self._access.guard.serve(self.app, route, caller, scope, limited_receive, send)

    def _check(self, scope: Message, path: str) -> tuple[Route, Caller]:
        """Checks the request, and returns its route and who asks. An agent's CALL_HEADER is removed: it must not say
        which of its steps are trained."""
        headers: Headers = scope["headers"]
        size, authorization, length, is_marked = 0, b"", b"0", False
        bare: dict[bytes, bytes] = {}
        key_headers = self._key_headers
        for name, value in headers:
            size += len(name) + len(value)
            if name == AUTHORIZATION:
                authorization = value
            elif name == b"content-length":
                length = value
            elif name == CALL_HEADER:
                is_marked = True
            elif name in key_headers:
                bare[name] = BEARER + value
        if size > LARGEST_HEADERS:
            raise TooLarge(f"the request's headers are larger than {LARGEST_HEADERS >> 10} KiB")
        keys = (authorization, *bare.values())
        admitted = self._access.admit(scope, path, keys)
        if is_marked and not self._access.may_mark(keys):
            headers[:] = [header for header in headers if header[0] != CALL_HEADER]
        if int(length) > self._largest_body:
            raise TooLarge(too_large_text(self._largest_body))
        return admitted


def _with_query(url: CallUrl, query: str) -> CallUrl:
    try:
        fields = parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
    except ValueError as failure:
        raise BadRequest(f"the query cannot be read: {failure}") from None
    return url._replace(query=dict(fields), text=f"{url.text}?{query}")


def _address(scope: Message) -> str:
    """The gateway's own address, as the client of that request knows it."""
    return str(URL(scope=scope).replace(path="", query=""))
