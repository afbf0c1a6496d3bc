"""Who may call what: a table of the gateway's routes and the keys they need.

- A path that is not in the table needs a control key.
- Paths are checked before they are routed: FastAPI does not say which template matched.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from stepwell.common.access_keys import BEARER, AccessKeys, SessionKey
from stepwell.gateway.dialects.dialect import Dialect
from stepwell.pool.api.sessions import SESSION_ROOT


class Access(Enum):
    """Which key a route needs."""

    OPEN = "open"
    """None."""
    TRAJECTORY = "trajectory"
    """The key of the trajectory that the URL names, or a control key."""
    SESSION = "session"
    """A session key, or a control key."""
    CONTROL = "control"
    """A control key."""


REFUSALS: Mapping[Access, str] = {
    Access.TRAJECTORY: (
        "this needs the key of the trajectory in the URL (api_key, as POST /init_trajectory gave it) or a control key; "
        "send it as the header Authorization: Bearer KEY, or x-api-key: KEY"
    ),
    Access.SESSION: (
        "this needs a session key (as POST /session_keys or `stepwell gateway key` gives it) or a control key; send it "
        "as the header Authorization: Bearer KEY, or x-api-key: KEY"
    ),
    Access.CONTROL: "this needs a control key; send it as the header Authorization: Bearer KEY",
}
"""The answer to a caller without the key."""

TRAJECTORY_ROOT = "/{trajectory_uid}/{prompt_uid}"
BELOW_A_TRAJECTORY = ("/v1", "", "/v1/v1")
"""An agent may append /v1 or not, to a base_url that ends in /v1 or not."""
MODELS = "models"
STEERING_CALLS = ("register_trajectory", "complete_trajectory", "abort_trajectory", "feedback")
"""Below a trajectory too, but not for the agent: it must not reward itself."""
CONTROL_CALLS = (
    *("/session_keys", "/generate", "/submit_steps", "/compute_reward", "/pacing", "/engines", "/forget"),
    *("/v1/models", "/v1/{rest:path}", "/metrics", "/docs", "/openapi.json"),
)


def access_table(dialects: Iterable[Dialect]) -> dict[str, Access]:
    """The access of each route template. Everything that agents may call is below two names, and nothing else is."""
    paths = [path for dialect in dialects for path in call_paths(dialect)]
    return {
        "/health": Access.OPEN,
        "/ready": Access.OPEN,
        **_below([*paths, MODELS], Access.TRAJECTORY),
        **_below(STEERING_CALLS, Access.CONTROL),
        **_below([*paths, MODELS], Access.SESSION, f"/{SESSION_ROOT}"),
        "/init_trajectory": Access.SESSION,
        **dict.fromkeys(CONTROL_CALLS, Access.CONTROL),
        **dict.fromkeys((f"/v1/{path}" for path in paths), Access.CONTROL),
    }


def call_paths(dialect: Dialect) -> tuple[str, ...]:
    """What agents may call in this dialect."""
    return dialect.paths if dialect.token_counter is None else (*dialect.paths, dialect.token_counter.path)


def _below(calls: Sequence[str], access: Access, root: str = TRAJECTORY_ROOT) -> dict[str, Access]:
    return {f"{root}{prefix}/{call}": access for prefix in BELOW_A_TRAJECTORY for call in calls}


class AccessCheck:
    def __init__(self, keys: AccessKeys, table: Mapping[str, Access]) -> None:
        self._keys = keys
        self._table = table

    def missing(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> Access | None:
        """The access that a request for `path` (decoded, as routes are matched) lacks; None if it may proceed.

        A key may come in the header Authorization or, as Anthropic's clients send it, in x-api-key.
        """
        if self._keys.open:
            return None
        access, trajectory_uid, prompt_uid = self._needed(path)
        if access is Access.OPEN:
            return None
        for header in (authorization, None if api_key is None else BEARER + api_key):
            if access is Access.TRAJECTORY:
                allowed = self._keys.may_call(header, trajectory_uid, prompt_uid)
            else:
                allowed = self._keys.may_control(header)
                if access is Access.SESSION:
                    allowed = allowed or self._keys.find_session_key(header) is not None
            if allowed:
                return None
        return access

    def session_key(self, authorization: bytes | None, api_key: bytes | None = None) -> SessionKey | None:
        """The session key by which a request is allowed; None if it is by a control key, or if no key is needed."""
        return self._keys.session_caller(authorization, None if api_key is None else BEARER + api_key)

    def may_mark(self, authorization: bytes | None, api_key: bytes | None = None) -> bool:
        """Whether the caller may say which of its steps are trained."""
        return any(map(self._keys.may_control, (authorization, None if api_key is None else BEARER + api_key)))

    def _needed(self, path: str) -> tuple[Access, str, str]:
        """What a path needs, and the trajectory that it names, if any."""
        _, *names = path.split("/", 3)
        if len(names) < 3 or names[0] in ("v1", SESSION_ROOT):
            return self._table.get(path, Access.CONTROL), "", ""
        trajectory_uid, prompt_uid, call = names
        return self._table.get(f"{TRAJECTORY_ROOT}/{call}", Access.CONTROL), trajectory_uid, prompt_uid
