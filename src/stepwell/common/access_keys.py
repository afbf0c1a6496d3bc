"""The keys: who may do everything, and who may act for one trajectory.

There is a control key, and one key for each trajectory: an HMAC of its names under the control key, so that every
process with the same control key can check it and none has to remember it. What always holds: comparisons take the same
time wherever two keys differ; a header that cannot be read is refused like a wrong key, never an exception.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Sequence
from functools import lru_cache

from stepwell.errors import BadRequest

NOT_NEEDED = "not-needed"
"""The key handed out where none is checked: OpenAI's SDKs insist on one."""
MIN_LENGTH = 16
PREFIX = b"sk-sw-"
DOMAIN = b"stepwell trajectory key 1\0"
"""Keeps these HMACs apart from any other use of the same secret."""
BEARER = b"bearer "
BASIC = b"basic "
SEALS_KEPT = 10_000
"""An agent calls many times with the same key."""


class AccessKeys:
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

    def _is_control(self, key: bytes) -> bool:
        return any(hmac.compare_digest(key, control) for control in self._control)


def _require_strong(number: int, key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise BadRequest(f"control key {number} has characters that no header can carry; use letters, digits, - and _")
    if len(key) < MIN_LENGTH:
        raise BadRequest(
            f"control key {number} has {len(key)} characters and could be guessed; use {MIN_LENGTH} or more, for "
            'example what `python -c "import secrets; print(secrets.token_urlsafe(32))"` prints'
        )


def _sent(authorization: str | bytes | None) -> bytes | None:
    """The key in an Authorization header: a bearer's, or a basic one's password, as a URL http://:KEY@host gives it."""
    if authorization is None:
        return None
    if isinstance(authorization, str):
        if not authorization.isascii():
            return None
        authorization = authorization.encode("ascii")
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    if authorization[: len(BASIC)].lower() == BASIC:
        return _password(authorization[len(BASIC) :].strip())
    return None


def _password(credentials: bytes) -> bytes | None:
    try:
        _, colon, password = b64decode(credentials, validate=True).partition(b":")
    except ValueError:
        return None
    return password if colon else None


def _named(trajectory_uid: str, prompt_uid: str) -> bytes:
    """Both names in one text that no other two names give."""
    return f"{len(trajectory_uid)}:{trajectory_uid}{prompt_uid}".encode(errors="surrogatepass")


@lru_cache(maxsize=SEALS_KEPT)
def _sealed(control: bytes, named: bytes) -> bytes:
    return PREFIX + urlsafe_b64encode(hmac.digest(control, DOMAIN + named, "sha256")).rstrip(b"=")
