"""The gateway's outermost layer: it checks origin, size and key of a request before anything else reads it.

- Model calls go straight to AgentCalls; FastAPI serves the rest. No client's path becomes a path at an engine.
- Keys are checked by the table of routes, before a path is routed: FastAPI does not say which template matched.
- The key of the trajectory in the URL is compared first: a recorded call pays for nothing else.
"""

import re
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import parse_qsl

from fastapi import FastAPI
from starlette.datastructures import URL

from stepwell.access.access_keys import BEARER
from stepwell.access.caller import AGENT, Caller, Role
from stepwell.access.route_table import (
    ANY_V1,
    MODELS,
    ROOTS,
    TRAJECTORY_ROOT,
    UNRECORDED_ROOTS,
    Route,
    RouteGuard,
    RouteTable,
    gateway_routes,
    wrong_role,
)
from stepwell.common.bounded_http import LARGEST_HEADERS
from stepwell.common.listening import CrossSiteCheck
from stepwell.errors import BadRequest, Forbidden, StepwellError, TooLarge, UnknownAddress
from stepwell.gateway.agent_calls import AgentCalls
from stepwell.gateway.calls import NO_TRAJECTORY, RESERVED_PREFIXES, RequestedCall, send_error
from stepwell.gateway.dialects.dialect import PLACE, Dialect
from stepwell.gateway.dialects.side_calls import CALL_HEADER
from stepwell.gateway.error_responses import describe
from stepwell.gateway.requests import LARGEST_BODY, CallUrl, Headers, Message, Receive, Send, limited, too_large_text
from stepwell.gateway.response_writer import ResponseWriter
from stepwell.pool.api.producing import TrajectoryRef
from stepwell.pool.api.sessions import RESERVED_UIDS
from stepwell.wire.gateway_api import UID_PATTERN

ATROPOS_PREFIX = "/atropos"
SESSION_BODY = 64 * 2**10
"""Bytes of a body by which the holder of a session key opens a session."""
AUTHORIZATION = b"authorization"
MARK_HEADER = CALL_HEADER.encode()
MOST_PARAMETERS = 100
"""Parameters of a query."""


def access_table(dialects: Iterable[Dialect]) -> RouteTable:
    return gateway_routes(path for dialect in dialects for path in call_paths(dialect))


def call_paths(dialect: Dialect) -> tuple[str, ...]:
    """The paths that agents may call in this dialect."""
    return dialect.paths if dialect.token_counter is None else (*dialect.paths, dialect.token_counter.path)


class AccessCheck:
    def __init__(self, guard: RouteGuard, table: RouteTable) -> None:
        self.guard = guard
        self._keys = guard.keys
        self._table = table

    def admit(self, scope: MutableMapping[str, Any], path: str, headers: Sequence[bytes]) -> tuple[Route, Caller]:
        """Returns the route that a request asks for, and who asks. Forbidden or NotPermitted if it may not proceed.

        `path` is decoded, and ends in the dialect's template if it is a model call's. `headers` are those that may have
        a key, in the form of Authorization; at least one.
        """
        route, trajectory_uid, prompt_uid = self._asked(scope["method"], path)
        is_for_agents = Role.TRAJECTORY in route.roles
        if is_for_agents and (agent := self._agent(trajectory_uid, prompt_uid, headers)) is not None:
            return route, agent
        try:
            return route, self.guard.admit(route, scope, *headers)
        except Forbidden:
            owner = self._owner(trajectory_uid, prompt_uid, headers)
            if owner is not None and (is_for_agents or owner.role in route.roles):
                return route, AGENT if is_for_agents else owner
            if trajectory_uid and not is_for_agents and self._agent(trajectory_uid, prompt_uid, headers) is not None:
                agent = replace(AGENT, id=f"of trajectory {trajectory_uid}")
                self.guard.refuse(route, scope, agent, wrong_role(route, agent))
            raise

    def may_mark(self, headers: Sequence[bytes]) -> bool:
        """Whether the caller may say which of its steps are trained."""
        return any(map(self._keys.may_control, headers))

    def _agent(self, trajectory_uid: str, prompt_uid: str, headers: Sequence[bytes]) -> Caller | None:
        """Who has the key of that trajectory, if anybody has."""
        for header in headers:
            if (agent := self._keys.agent(header, trajectory_uid, prompt_uid)) is not None:
                return agent
        return None

    def _owner(self, trajectory_uid: str, prompt_uid: str, headers: Sequence[bytes]) -> Caller | None:
        """Who opened that trajectory, if a header has its owner's key. Nobody for the prompt_uid of a session: it names
        the session, whatever the trajectory_uid beside it."""
        if not trajectory_uid or prompt_uid.startswith(RESERVED_PREFIXES):
            return None
        owners = (self._keys.owner(header, trajectory_uid) for header in headers)
        return next((owner for owner in owners if owner is not None), None)

    def _asked(self, method: str, path: str) -> tuple[Route, str, str]:
        """The route of a path, and the trajectory that it names, if any."""
        _, *names = path.split("/", 3)
        if len(names) < 3 or names[0] in RESERVED_UIDS:
            return self._table.find(method, path), "", ""
        trajectory_uid, prompt_uid, call = names
        return self._table.find(method, f"{TRAJECTORY_ROOT}/{call}"), trajectory_uid, prompt_uid


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
            elif name == MARK_HEADER:
                is_marked = True
            elif name in key_headers:
                bare[name] = BEARER + value
        if size > LARGEST_HEADERS:
            raise TooLarge(f"the request's headers are larger than {LARGEST_HEADERS >> 10} KiB")
        keys = (authorization, *bare.values())
        admitted = self._access.admit(scope, path, keys)
        if is_marked and not self._access.may_mark(keys):
            headers[:] = [header for header in headers if header[0] != MARK_HEADER]
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
