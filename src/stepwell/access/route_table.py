"""Who may call what: one table of the routes of the gateway, the Atropos server and the dashboard, and the guard that
lets a request in, or says why not, and records control calls.

- The admin may call everything. A request that is not in the table is for the admin alone.
- docs/operations/security.md has the same table, and tests/security asks for every row with every role.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog, call_text
from stepwell.access.caller import ANYONE, CALLER, Caller, Role
from stepwell.errors import Forbidden, NotPermitted
from stepwell.pool.api.sessions import SESSION_ROOT, UNRECORDED_ROOT, V1_ROOT

TRAJECTORY_ROOT = "/{trajectory_uid}/{prompt_uid}"
BELOW_A_TRAJECTORY = ("/v1", "", "/v1/v1", "/v1/v1/v1")
"""A base_url ends in /v1. A user may remove that or append another one, and so may the user's client."""
ANY_V1 = rf"(?:/v1){{0,{len(BELOW_A_TRAJECTORY) - 1}}}"
"""One of BELOW_A_TRAJECTORY, as a regular expression."""
ROOTS = (f"/{V1_ROOT}", f"/{V1_ROOT}/v1", *(f"/{SESSION_ROOT}{v1}" for v1 in BELOW_A_TRAJECTORY))
"""The places below which a call opens a session, or its header names the trajectory: /v1 and its other spellings."""
UNRECORDED_ROOTS = tuple(f"/{UNRECORDED_ROOT}{v1}" for v1 in BELOW_A_TRAJECTORY)
MODELS = "models"

READERS = (Role.VIEWER, Role.CURATOR)
OPENERS = (Role.SESSION, Role.RUNNER)
"""The roles that may open a trajectory."""
SAMPLERS = (Role.RUNNER, Role.ENVIRONMENT)
"""The roles that may make model calls that are not recorded."""
AT_ATROPOS = (Role.ENVIRONMENT, Role.TRAINER, *READERS)
NOBODY: tuple[Role, ...] = ()
"""No role: only the admin may call."""

STATIC_ROOT = "/static/"
STATIC = f"{STATIC_ROOT}{{name:path}}"

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

HOW = "send it as the header Authorization: Bearer KEY, or x-api-key: KEY"
NO_STATUS = 0
"""The status, in the record, of a call that was not answered."""


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    """A template, as the server's routes have it."""
    roles: frozenset[Role] = frozenset()
    """The roles that may call the route, beside the admin."""
    is_open: bool = False
    """Everyone may call it, without a key."""
    is_recorded: bool = False
    """Calls go into the audit log: they change something."""
    is_for_scoped: bool = False
    """A key for some channels may call it: it is about no channel, or the server checks the channel."""


class RouteTable:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = {(route.method, route.path): route for route in routes}

    def find(self, method: str, path: str) -> Route:
        """The route of a request; the admin's if the table has none."""
        return self._routes.get((method, path)) or Route(method, path)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())


def _open(*calls: str) -> list[Route]:
    return [Route(method, path, is_open=True) for method, path in map(str.split, calls)]


def _read(roles: Sequence[Role], *calls: str, scoped: bool = True) -> list[Route]:
    return [Route(method, path, frozenset(roles), is_for_scoped=scoped) for method, path in map(str.split, calls)]


def _change(roles: Sequence[Role], *calls: str, scoped: bool = True) -> list[Route]:
    allowed = frozenset(roles)
    return [
        Route(method, path, allowed, is_recorded=True, is_for_scoped=scoped) for method, path in map(str.split, calls)
    ]


def _below(root: str, method: str, calls: Iterable[str]) -> list[str]:
    return _at([root + prefix for prefix in BELOW_A_TRAJECTORY], method, calls)


def _at(roots: Iterable[str], method: str, calls: Iterable[str]) -> list[str]:
    calls = tuple(calls)
    return [f"{method} {root}/{call}" for root in roots for call in calls]


def gateway_routes(model_calls: Iterable[str]) -> RouteTable:
    """`model_calls` are the paths of the dialects. All that an agent may call is below a trajectory or one of ROOTS."""
    model_calls = tuple(model_calls)
    steering = ("register_trajectory", "complete_trajectory", "abort_trajectory")
    return RouteTable(
        [
            *_open("GET /health", "GET /ready"),
            *_read([Role.TRAJECTORY], *_below(TRAJECTORY_ROOT, "POST", model_calls)),
            *_read([Role.TRAJECTORY], *_below(TRAJECTORY_ROOT, "GET", [MODELS])),
            *_read(OPENERS, *_at(ROOTS, "POST", model_calls)),
            *_read([*OPENERS, Role.ENVIRONMENT, Role.TRAINER, *READERS], *_at(ROOTS, "GET", [MODELS])),
            *_change(OPENERS, "POST /init_trajectory"),
            *_change([Role.RUNNER], *_below(TRAJECTORY_ROOT, "POST", steering), "POST /submit_steps"),
            *_change([Role.REWARD], *_below(TRAJECTORY_ROOT, "POST", ["feedback"])),
            *_read([Role.RUNNER, Role.REWARD], "POST /compute_reward"),
            *_read(SAMPLERS, "POST /generate", *_at(UNRECORDED_ROOTS, "POST", model_calls)),
            *_read(SAMPLERS, *_at(UNRECORDED_ROOTS, "GET", [MODELS])),
            *_read([Role.RUNNER, Role.TRAINER, *READERS], "GET /pacing"),
            *_read([Role.TRAINER, *READERS], "GET /engines"),
            *_read([Role.RUNNER, *READERS], "GET /openapi.json"),
            *_read(READERS, "GET /metrics", scoped=False),
            *_change(NOBODY, "POST /session_keys", "POST /engines", "DELETE /engines", "POST /forget"),
            *_read(NOBODY, "POST /v1/{rest:path}"),
        ]
    )


ATROPOS_ROUTES = RouteTable(
    [
        *_open("GET /health", "GET /ready"),
        *_read(READERS, "GET /metrics", scoped=False),
        *_read(AT_ATROPOS, "GET /", "GET /info", "GET /wandb_info", "GET /status"),
        *_change([Role.ENVIRONMENT], "POST /register-env", "POST /disconnect-env"),
        *_change([Role.ENVIRONMENT], "POST /scored_data", "POST /scored_data_list"),
        *_read([Role.ENVIRONMENT], "GET /status-env"),
        *_change([Role.TRAINER], "POST /register", "POST /batch/ack", "POST /batch/nack"),
        *_read([Role.TRAINER], "GET /batch"),
        *_read([Role.TRAINER, *READERS], "GET /latest_example"),
        *_change(NOBODY, "POST /reset_data", "GET /reset_data"),
    ]
)
"""The same below /channel/NAME."""


DASHBOARD_ROUTES = RouteTable(
    [
        *_open("GET /", f"GET {STATIC}", "GET /health", "GET /login", "GET /login/callback", "POST /logout"),
        *_read(READERS, "GET /metrics", "GET /api/me", "GET /api/status", "GET /api/series", scoped=False),
        *_read(READERS, "GET /api/trajectories", "GET /api/trajectory", "GET /api/group", scoped=False),
        *_read(READERS, "GET /api/preview", "GET /api/audit", scoped=False),
        *_change([Role.CURATOR], "POST /api/curate", scoped=False),
    ]
)
"""The routes of the dashboard. They show all channels: a key for some of them is refused."""


class RouteGuard:
    def __init__(self, keys: AccessKeys, audit: AuditLog | None = None) -> None:
        self.keys = keys
        self._audit = audit

    def admit(
        self,
        route: Route,
        scope: Message,
        *authorizations: str | bytes | None,
        channel: str | None = None,
        person: Caller | None = None,
    ) -> Caller:
        """Forbidden without a valid key. NotPermitted if its role or scope does not allow it; `channel` is the one that
        the request is about, if that is known already. `person` needs no key: they are logged in."""
        if route.is_open:
            return ANYONE
        caller = person or self.keys.caller(*authorizations)
        if caller is None:
            raise Forbidden(self.keys.why_void(*authorizations) or needs_key(route))
        if not self.keys.open and caller.role is not Role.ADMIN:
            self._check(route, scope, caller, channel)
        return caller

    def refuse(self, route: Route, scope: Message, caller: Caller, why: str) -> NoReturn:
        """NotPermitted. It is recorded if the call would be."""
        if self._audit is not None and route.is_recorded:
            self._audit.add(caller, call_text(scope), 403)
        raise NotPermitted(why)

    def _check(self, route: Route, scope: Message, caller: Caller, channel: str | None) -> None:
        if caller.role not in route.roles:
            self.refuse(route, scope, caller, wrong_role(route, caller))
        if caller.is_scoped and not route.is_for_scoped:
            why = f"the key {caller.id} is for {caller.scope_text}; this is about all channels"
            self.refuse(route, scope, caller, why)
        if channel is not None and not caller.may_use(channel):
            why = f"the key {caller.id} is for {caller.scope_text}; this is in the channel {channel}"
            self.refuse(route, scope, caller, why)

    async def serve(
        self, app: Application, route: Route, caller: Caller, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Call the application for an admitted caller, and record the call if it is one that changes something."""
        scope[CALLER] = caller
        if self._audit is None or not route.is_recorded:
            await app(scope, receive, send)
            return
        status = NO_STATUS

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting_status)
        finally:
            self._audit.add(caller, call_text(scope), status)


def needs_key(route: Route) -> str:
    """The answer to a caller without a valid key."""
    if Role.TRAJECTORY in route.roles:
        which = "the key of the trajectory in the URL (api_key, as POST /init_trajectory gave it)"
    elif Role.SESSION in route.roles:
        which = "a session key (as POST /session_keys or `stepwell gateway key` gives it)"
        if others := route.roles - {Role.SESSION}:
            which += f", a key with the role {' or '.join(sorted(others))}"
    elif route.roles:
        which = f"a key with the role {' or '.join(sorted(route.roles))}"
    else:
        return f"this needs a control key; {HOW}"
    return f"this needs {which}, or a control key; {HOW}"


def wrong_role(route: Route, caller: Caller) -> str:
    others = f"{', '.join(sorted(route.roles))} and " if route.roles else ""
    why = f"{caller.id} has the role {caller.role}; this is for {others}{Role.ADMIN}"
    if caller.role in SAMPLERS and route.path.startswith(ROOTS):
        return f"{why}. {ROOTS[0]} records its calls; yours, which are not recorded, go to {UNRECORDED_ROOTS[0]}"
    if Role.SESSION is caller.role and route.path.startswith(UNRECORDED_ROOTS):
        return f"{why}. Yours, which are recorded, go to {ROOTS[0]}"
    return why
