"""Who may call what.

There is a control key, and one key for each trajectory: an HMAC of its names under the control key, so that every
gateway with the same control key can check it and none has to remember it. What always holds: comparisons take the same
time wherever two keys differ; a header that cannot be read is refused like a wrong key, never an exception; a path
that the table does not know needs a control key. Paths are judged before they are routed: FastAPI does not say which
template matched (an included router's routes know nothing of their prefix).
"""

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache

from stepwell.errors import BadRequest

NOT_NEEDED = "not-needed"
"""The key handed out where none is checked: OpenAI's SDKs insist on one."""
MIN_LENGTH = 16
PREFIX = b"sk-sw-"
DOMAIN = b"stepwell trajectory key 1\0"
"""Keeps these HMACs apart from any other use of the same secret."""
BEARER = b"bearer "
SEALS_KEPT = 10_000
"""An agent calls many times with the same key."""


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
    "/v1/{rest:path}": Access.CONTROL,
    "/metrics": Access.CONTROL,
    "/docs": Access.CONTROL,
    "/openapi.json": Access.CONTROL,
}
"""By route template. All that agents may call stands two names below the root, and nothing else may end like it."""


class Keys:
    """The control keys, and the trajectories' keys made from them."""

    def __init__(self, control_keys: Sequence[str]) -> None:
        """The first key is the current one; the others, older or about to become current, are accepted as well.

        Without any, everything is open.
        """
        for number, key in enumerate(control_keys, start=1):
            _require_strong(number, key)
        self._control = tuple(key.encode("ascii") for key in control_keys)

    @property
    def open(self) -> bool:
        """Whether no key is ever asked for."""
        return not self._control

    def trajectory_key(self, trajectory_uid: str, prompt_uid: str) -> str:
        if not self._control:
            return NOT_NEEDED
        return _sealed(self._control[0], _named(trajectory_uid, prompt_uid)).decode("ascii")

    def may_control(self, authorization: str | bytes | None) -> bool:
        if not self._control:
            return True
        key = _sent(authorization)
        return key is not None and self._is_control(key)

    def may_call(self, authorization: str | bytes | None, trajectory_uid: str, prompt_uid: str) -> bool:
        """Whether the agent with that header may act for that trajectory."""
        if not self._control:
            return True
        key = _sent(authorization)
        if key is None:
            return False
        named = _named(trajectory_uid, prompt_uid)
        if any(hmac.compare_digest(key, _sealed(control, named)) for control in self._control):
            return True
        return self._is_control(key)

    def missing(self, path: str, authorization: str | bytes | None) -> Access | None:
        """The access that a request for `path` (decoded, as routes are matched) lacks; None if it may go on."""
        if not self._control:
            return None
        access, trajectory_uid, prompt_uid = _asked(path)
        if access is Access.OPEN:
            return None
        if access is Access.TRAJECTORY:
            allowed = self.may_call(authorization, trajectory_uid, prompt_uid)
        else:
            allowed = self.may_control(authorization)
        return None if allowed else access

    def _is_control(self, key: bytes) -> bool:
        return any(hmac.compare_digest(key, control) for control in self._control)


def _asked(path: str) -> tuple[Access, str, str]:
    """What a path asks for, and the trajectory it names, if it does."""
    _, *names = path.split("/", 3)
    if len(names) < 3:
        return ACCESS.get(path, Access.CONTROL), "", ""
    trajectory_uid, prompt_uid, call = names
    return ACCESS.get(f"{TRAJECTORY_ROOT}/{call}", Access.CONTROL), trajectory_uid, prompt_uid


def _require_strong(number: int, key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise BadRequest(f"control key {number} has characters that no header can carry; use letters, digits, - and _")
    if len(key) < MIN_LENGTH:
        raise BadRequest(
            f"control key {number} has {len(key)} characters and could be guessed; use {MIN_LENGTH} or more, for "
            'example what `python -c "import secrets; print(secrets.token_urlsafe(32))"` prints'
        )


def _sent(authorization: str | bytes | None) -> bytes | None:
    """The key in an Authorization header."""
    if authorization is None:
        return None
    if isinstance(authorization, str):
        if not authorization.isascii():
            return None
        authorization = authorization.encode("ascii")
    return authorization[len(BEARER) :].strip() if authorization[: len(BEARER)].lower() == BEARER else None


def _named(trajectory_uid: str, prompt_uid: str) -> bytes:
    """Both names in one text that no other two names give."""
    return f"{len(trajectory_uid)}:{trajectory_uid}{prompt_uid}".encode(errors="surrogatepass")


@lru_cache(maxsize=SEALS_KEPT)
def _sealed(control: bytes, named: bytes) -> bytes:
    return PREFIX + urlsafe_b64encode(hmac.digest(control, DOMAIN + named, "sha256")).rstrip(b"=")
