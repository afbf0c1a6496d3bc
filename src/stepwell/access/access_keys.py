"""Access keys: a control key allows everything, a trajectory key allows calls for one trajectory, a session key allows
a user to open sessions, and an issued key, of a key file, allows what its role does.

- A trajectory key is an HMAC of the trajectory's names under the control key. Every process with the same control key
  can check it, and none has to store it. If its trajectory was opened with an issued key, it names that one, and is
  void when that one is. If it is the key of a session, it tells its user, whose quota holds for all sessions.
- The owner's key of a trajectory is for a base_url that contains its key: it holds under any prompt_uid, and steers
  the trajectory too.
- A session key names its user, and says whether the user's calls are recorded, with an HMAC of both.
- The time of a comparison does not depend on where two keys differ.
- A header that cannot be parsed is refused like a wrong key; it never raises.
"""

import hmac
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256

from stepwell.access.caller import AGENT, ANYONE, Caller, Role, SessionKey
from stepwell.access.key_file import KeyFile
from stepwell.errors import BadRequest

NOT_NEEDED = "not-needed"
"""The trajectory key if no keys are checked. OpenAI's SDKs require one."""
MIN_LENGTH = 16
PREFIX = b"sk-sw-"
DOMAIN = b"stepwell trajectory key 1\0"
"""Separates these HMACs from other uses of the same secret."""
ISSUED_DOMAIN = b"stepwell trajectory key of an issued key 1\0"
ISSUER_MARK = b"."
"""The separator between the opener and the HMAC, in the keys of trajectories that were opened with an issued or a
session key."""
USER_MARK = b"~"
"""The mark before the name of a session key's user, where others have the id of an issued key."""
SESSION_KEY_PREFIX = b"sk-sws-"
SESSION_DOMAIN = b"stepwell session key 1\0"
CAPTURED, NOT_CAPTURED = b"1", b"0"
BEARER = b"bearer "
BASIC = b"basic "
CACHED_KEYS = 10_000
"""An agent calls many times with the same key."""
ANY_GROUP = ""
"""The text that an owner's key has in the place of the prompt_uid. No group has this name."""
LONGEST_MESSAGE = 1_000
"""Bytes of a trajectory's two names. Longer ones name nothing, and are not cached."""


class AccessKeys:
    """The control keys, the trajectory keys made from them, and the issued keys."""

    def __init__(self, control_keys: Sequence[str], issued: KeyFile | None = None) -> None:
        """The first key is the current one. The others, older or upcoming, are accepted too.

        Without keys, everything is allowed.
        """
        for number, key in enumerate(control_keys, start=1):
            _require_strong(number, key)
        if issued is not None and not control_keys:
            raise BadRequest("--keys-file needs --control-keys: the keys of trajectories are made from a control key")
        self._control = tuple(key.encode("ascii") for key in control_keys)
        self._admins = tuple(Caller(f"control-{sha256(key).hexdigest()[:8]}", Role.ADMIN) for key in self._control)
        self._issued = issued

    @property
    def open(self) -> bool:
        """True if no key is required."""
        return not self._control

    def trajectory_key(self, trajectory_uid: str, prompt_uid: str, opener: Caller = ANYONE) -> str:
        """`opener` is who opens the trajectory."""
        if not self._control:
            return NOT_NEEDED
        issuer = b""
        if opener.is_issued:
            issuer = opener.id.encode()
        elif opener.session is not None:
            issuer = USER_MARK + _encoded(opener.session.user.encode(errors="surrogatepass"))
        return _derived_key(self._control[0], _key_message(trajectory_uid, prompt_uid), issuer).decode("ascii")

    def owner_key(self, trajectory_uid: str, opener: Caller) -> str:
        """The key with which the opener of a trajectory steers it and its agent calls, whatever its prompt_uid."""
        return self.trajectory_key(trajectory_uid, ANY_GROUP, opener)

    def may_control(self, authorization: str | bytes | None) -> bool:
        caller = self.caller(authorization)
        return caller is not None and caller.role is Role.ADMIN

    def may_call(self, authorization: str | bytes | None, trajectory_uid: str, prompt_uid: str) -> bool:
        """True if an agent with that header may make calls for that trajectory."""
        return self.agent(authorization, trajectory_uid, prompt_uid) is not None or self.may_control(authorization)

    def agent(self, authorization: str | bytes | None, trajectory_uid: str, prompt_uid: str) -> Caller | None:
        """Who has the key of that trajectory in that header; None if it has another key. An agent in a session that was
        opened with a session key has the session of that key."""
        if self.open:
            return ANYONE
        opener = self._opener(authorization, trajectory_uid, prompt_uid)
        if opener is None or opener.session is None:
            return None if opener is None else AGENT
        return replace(AGENT, session=opener.session)

    def owner(self, authorization: str | bytes | None, trajectory_uid: str) -> Caller | None:
        """Who opened the trajectory, if the header has its owner's key. A control key's holder is a runner here."""
        opener = self._opener(authorization, trajectory_uid, ANY_GROUP)
        return replace(opener, role=Role.RUNNER) if opener is not None and opener.role is Role.ADMIN else opener

    def _opener(self, authorization: str | bytes | None, trajectory_uid: str, prompt_uid: str) -> Caller | None:
        """Who opened the trajectory, as its key tells; None if the header has another key, or the opener's is void."""
        key, message = _key_in(authorization), _key_message(trajectory_uid, prompt_uid)
        if len(message) > LONGEST_MESSAGE:
            return None
        for control, admin in zip(self._control, self._admins, strict=True):
            if hmac.compare_digest(key, _derived_key(control, message)):
                return admin
        issuer = key.removeprefix(PREFIX).partition(ISSUER_MARK)[0] if ISSUER_MARK in key else b""
        opener = self._opener_named(issuer) if issuer else None
        if opener is None or not any(
            hmac.compare_digest(key, _derived_key(control, message, issuer)) for control in self._control
        ):
            return None
        return opener

    def _opener_named(self, issuer: bytes) -> Caller | None:
        """None if the opener's key is void, or there is none."""
        if issuer.startswith(USER_MARK):
            with suppress(ValueError):
                return replace(AGENT, session=SessionKey(_decoded(issuer[1:]).decode(errors="surrogatepass")))
            return None
        return self._issued.find_id(issuer.decode(errors="replace")) if self._issued is not None else None

    def caller(self, *authorizations: str | bytes | None) -> Caller | None:
        """Who makes a request with these headers: by a control key, else by an issued key, else by a session key. None
        if none of the headers has one that is valid."""
        keys = [key for key in map(_key_in, authorizations) if key]
        for key in keys:
            for control, admin in zip(self._control, self._admins, strict=True):
                if hmac.compare_digest(key, control):
                    return admin
        if self._issued is not None:
            for key in keys:
                if (issued := self._issued.find(key)) is not None:
                    return issued
        session = next(filter(None, map(self.find_session_key, authorizations)), None)
        if session is not None:
            return Caller(f"user {session.user}", Role.SESSION, session=session)
        return ANYONE if self.open else None

    def why_void(self, *authorizations: str | bytes | None) -> str:
        """Which of the issued keys in these headers has expired or was revoked; empty if none."""
        keys = filter(None, map(_key_in, authorizations))
        return next(filter(None, map(self._issued.why_void, keys)), "") if self._issued is not None else ""

    def session_key(self, key: SessionKey) -> str:
        """Without control keys it is no secret, but it still tells users apart."""
        return _session_key((self._control or (b"",))[0], key).decode("ascii")

    def find_session_key(self, authorization: str | bytes | None) -> SessionKey | None:
        """The session key in that header, read; None if it has no valid one."""
        given = _key_in(authorization)
        if not given.startswith(SESSION_KEY_PREFIX):
            return None
        said = _read_session_key(given)
        controls = self._control or (b"",)
        is_valid = said and any(hmac.compare_digest(given, _session_key(control, said)) for control in controls)
        return said if is_valid else None

    def secrets(self, domain: bytes) -> tuple[bytes, ...]:
        """A secret for another use, one for each control key; without keys, one that is no secret."""
        return tuple(hmac.digest(control, domain, "sha256") for control in self._control or (b"",))


def _require_strong(number: int, key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise BadRequest(f"control key {number} has characters that no header can carry; use letters, digits, - and _")
    if len(key) < MIN_LENGTH:
        raise BadRequest(
            f"control key {number} has {len(key)} characters and could be guessed; use {MIN_LENGTH} or more, for "
            'example what `python -c "import secrets; print(secrets.token_urlsafe(32))"` prints'
        )


def is_in_url(authorization: str | None) -> bool:
    """Whether a key came as a part of the URL: HTTP clients send that as basic credentials."""
    return (authorization or "").lower().startswith(BASIC.decode())


def _key_in(authorization: str | bytes | None) -> bytes:
    """The key in an Authorization header: a bearer token, or the password of basic credentials (http://:KEY@host).

    Empty, which is never a key, if there is none.
    """
    if isinstance(authorization, str):
        authorization = authorization.encode(errors="surrogatepass")
    if authorization is None:
        return b""
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    if authorization[: len(BASIC)].lower() == BASIC:
        with suppress(ValueError):
            return b64decode(authorization[len(BASIC) :].strip(), validate=True).partition(b":")[2]
    return b""


def _key_message(trajectory_uid: str, prompt_uid: str) -> bytes:
    """One text of both names, which is different for every pair of names."""
    return f"{len(trajectory_uid)}:{trajectory_uid}{prompt_uid}".encode(errors="surrogatepass")


@lru_cache(maxsize=CACHED_KEYS)
def _derived_key(control: bytes, message: bytes, issuer: bytes = b"") -> bytes:
    if not issuer:
        return PREFIX + _encoded(hmac.digest(control, DOMAIN + message, "sha256"))
    digest = hmac.digest(control, ISSUED_DOMAIN + issuer + b"\0" + message, "sha256")
    return PREFIX + issuer + ISSUER_MARK + _encoded(digest)


def _encoded(value: bytes) -> bytes:
    return urlsafe_b64encode(value).rstrip(b"=")


def _decoded(value: bytes) -> bytes:
    return urlsafe_b64decode(value + b"=" * (-len(value) % 4))


def _session_key(control: bytes, key: SessionKey) -> bytes:
    said = (CAPTURED if key.is_captured else NOT_CAPTURED) + key.user.encode(errors="surrogatepass")
    digest = hmac.digest(control, SESSION_DOMAIN + said, "sha256")
    return SESSION_KEY_PREFIX + b".".join(map(_encoded, (said, digest)))


def _read_session_key(key: bytes) -> SessionKey | None:
    """The content of the key, whether it is valid or not; None if it cannot be read."""
    encoded = key.removeprefix(SESSION_KEY_PREFIX).partition(b".")[0]
    with suppress(ValueError):
        said = _decoded(encoded)
        if said[:1] in (CAPTURED, NOT_CAPTURED):
            return SessionKey(said[1:].decode(errors="surrogatepass"), said[:1] == CAPTURED)
    return None
