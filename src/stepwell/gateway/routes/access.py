"""Who may call what: a table of the gateway's routes and the keys they ask for.

What always holds: a path that the table does not know needs a control key. Paths are judged before they are routed:
FastAPI does not say which template matched (an included router's routes know nothing of their prefix).
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from stepwell.common.access_keys import AccessKeys


class Access(Enum):
    """Which key a route asks for."""

    OPEN = "open"
    """None."""
    TRAJECTORY = "trajectory"
    """The key of the trajectory that the URL names, or a control key."""
    CONTROL = "control"
    """A control key."""


REFUSALS: Mapping[Access, str] = {
    Access.TRAJECTORY: (
        "this needs the key of the trajectory in the URL (api_key, as POST /init_trajectory gave it) or a control key; "
        "send it as the header Authorization: Bearer KEY"
    ),
    Access.CONTROL: "this needs a control key; send it as the header Authorization: Bearer KEY",
}
"""What is answered to those without the key."""

BELOW_A_TRAJECTORY = ("/v1", "", "/v1/v1")
"""An agent may append /v1 or not, to a base_url that ends in /v1 or not: all are meant."""
AGENT_CALLS = ("/chat/completions", "/completions", "/models")
STEERING_CALLS = ("/register_trajectory", "/complete_trajectory", "/abort_trajectory", "/feedback")
"""Below a trajectory too, but not the agent's to call: it must not give itself a reward."""


TRAJECTORY_ROOT = "/{trajectory_uid}/{prompt_uid}"


def _below(calls: Sequence[str], access: Access) -> dict[str, Access]:
    return {TRAJECTORY_ROOT + at + call: access for at in BELOW_A_TRAJECTORY for call in calls}


ACCESS: Mapping[str, Access] = {
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    **_below(AGENT_CALLS, Access.TRAJECTORY),
    **_below(STEERING_CALLS, Access.CONTROL),
    "/init_trajectory": Access.CONTROL,
    "/generate": Access.CONTROL,
    "/submit_steps": Access.CONTROL,
    "/compute_reward": Access.CONTROL,
    "/pacing": Access.CONTROL,
    "/engines": Access.CONTROL,
    "/v1/models": Access.CONTROL,
    "/v1/chat/completions": Access.CONTROL,
    "/v1/completions": Access.CONTROL,
    "/v1/{rest:path}": Access.CONTROL,
    "/metrics": Access.CONTROL,
    "/docs": Access.CONTROL,
    "/openapi.json": Access.CONTROL,
}
"""By route template. All that agents may call stands two names below the root, and nothing else may end like it."""


def missing(keys: AccessKeys, path: str, authorization: str | bytes | None) -> Access | None:
    """The access that a request for `path` (decoded, as routes are matched) lacks; None if it may go on."""
    if keys.open:
        return None
    access, trajectory_uid, prompt_uid = _asked(path)
    if access is Access.OPEN:
        return None
    if access is Access.TRAJECTORY:
        allowed = keys.may_call(authorization, trajectory_uid, prompt_uid)
    else:
        allowed = keys.may_control(authorization)
    return None if allowed else access


def _asked(path: str) -> tuple[Access, str, str]:
    """What a path asks for, and the trajectory it names, if it does."""
    _, *names = path.split("/", 3)
    if len(names) < 3 or names[0] == "v1":
        return ACCESS.get(path, Access.CONTROL), "", ""
    trajectory_uid, prompt_uid, call = names
    return ACCESS.get(f"{TRAJECTORY_ROOT}/{call}", Access.CONTROL), trajectory_uid, prompt_uid
