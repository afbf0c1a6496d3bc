"""The gateway's checks of keys, by its table of routes.

- Paths are checked before they are routed: FastAPI does not say which template matched.
- The key of the trajectory in the URL is compared first: a recorded call pays for nothing else.
"""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.access.caller import AGENT, Caller, Role
from stepwell.access.route_table import TRAJECTORY_ROOT, Route, RouteGuard, RouteTable, gateway_routes, wrong_role
from stepwell.errors import Forbidden
from stepwell.gateway.calls import RESERVED_PREFIXES
from stepwell.gateway.dialects.dialect import Dialect
from stepwell.pool.api.sessions import RESERVED_UIDS


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
