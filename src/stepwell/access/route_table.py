"""Who may call what: one table of the routes of the gateway, the Atropos server and the dashboard.

- The admin may call everything. A request that is not in the table is for the admin alone.
- docs/operations/security.md has the same table, and tests/security asks for every row with every role.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepwell.access.caller import Role
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


READERS = (Role.VIEWER, Role.CURATOR)
OPENERS = (Role.SESSION, Role.RUNNER)
"""The roles that may open a trajectory."""
SAMPLERS = (Role.RUNNER, Role.ENVIRONMENT)
"""The roles that may make model calls that are not recorded."""
AT_ATROPOS = (Role.ENVIRONMENT, Role.TRAINER, *READERS)
NOBODY: tuple[Role, ...] = ()
"""No role: only the admin may call."""


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

STATIC_ROOT = "/static/"
STATIC = f"{STATIC_ROOT}{{name:path}}"
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
