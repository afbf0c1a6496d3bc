"""Issued keys: a file with their hashes, roles, scopes and dates. It has no key in it.

- Servers read it again when it has changed, at most once a second: a revocation takes effect without a restart.
- A file that cannot be read, or that others could have changed, makes all of its keys void.
- Commands that change it wait for one another. A reader never sees half a file.
"""

import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import orjson

from stepwell.access.caller import UNSCOPED, Caller, Role, SessionKey
from stepwell.common.files import CHANGEABLE, replacing_file
from stepwell.common.user_input import read_duration
from stepwell.errors import BadRequest

log = logging.getLogger("stepwell.access")

ISSUED_PREFIX = "sk-swk-"
SECRET_BYTES, ID_BYTES = 32, 4
LOOK_INTERVAL = 1.0
"""Seconds after which a change of the file is noticed."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
CHANNEL = re.compile(r"[^\s,]{1,64}")
NEVER = "never"
LONGEST = 100 * 366 * 86_400.0
"""Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    id: str
    name: str
    role: Role
    digest: str
    """SHA-256 of the key."""
    channels: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def why_void(self, now: float) -> str:
        """Empty if it is valid."""
        if self.revoked_at is not None:
            return "was revoked"
        return "has expired" if self.expires_at is not None and now >= self.expires_at else ""

    def caller(self) -> Caller:
        session = None
        if self.role is Role.SESSION:
            session = SessionKey(self.name, channel=self.channels[0] if self.channels else None)
        return Caller(self.id, self.role, self.channels, self.projects, session, is_issued=True)


class KeyFile:
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, interval: float = LOOK_INTERVAL) -> None:
        """The file may not exist yet. BadRequest if there is one that is not to be used."""
        self._path = path
        self._clock = clock
        self._interval = interval
        self._look_at = 0.0
        self._seen: tuple[int, ...] = ()
        self._by_digest: Mapping[str, tuple[IssuedKey, Caller]] = {}
        self._by_id: Mapping[str, tuple[IssuedKey, Caller]] = {}
        read_keys(path)

    def find(self, key: bytes) -> Caller | None:
        """The caller with that key; None if there is none, or it is void."""
        self._refresh()
        issued, caller = self._by_digest.get(digest_of(key), (None, None))
        return None if issued is None or issued.why_void(self._clock()) else caller

    def why_void(self, key: bytes) -> str:
        """The reason why a key of the file is void; empty if it is unknown or valid."""
        issued, _ = self._by_digest.get(digest_of(key), (None, None))
        why = issued.why_void(self._clock()) if issued else ""
        return f"the key {issued.id} {why}" if issued and why else ""

    def find_id(self, key_id: str) -> Caller | None:
        """The caller whose key has that id; None if there is none, or it is void."""
        self._refresh()
        issued, caller = self._by_id.get(key_id, (None, None))
        return None if issued is None or issued.why_void(self._clock()) else caller

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self._interval
        seen: tuple[int, ...] = ()
        with suppress(OSError):
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid)
        if seen == self._seen:
            return
        try:
            keys = read_keys(self._path)
        except BadRequest as failure:
            log.error("%s; until it can be read, its keys are void", failure)
            keys = []
        self._seen = seen
        self._by_digest = {key.digest: (key, key.caller()) for key in keys}
        self._by_id = {found[0].id: found for found in self._by_digest.values()}


def digest_of(key: bytes) -> str:
    """A key has 256 random bits, so that nothing slower is needed."""
    return sha256(key).hexdigest()


def read_keys(path: Path) -> list[IssuedKey]:
    """Empty if there is no file. BadRequest if it is not one of keys, or not to be trusted."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & CHANGEABLE:
                mode = f"{stat.S_IMODE(found.st_mode):04o}"
                raise BadRequest(f"{path} is not used: others could have put keys into it (its mode is {mode})")
            raw = file.read()
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise BadRequest(f"{path} cannot be read: {failure.strerror}") from None
    try:
        return [_read(entry) for entry in orjson.loads(raw)["keys"]]
    except (ValueError, TypeError, KeyError) as failure:
        raise BadRequest(f"{path} is not a file of keys: {failure!r}") from None


def create_key(
    path: Path,
    role: Role,
    *,
    name: str = "",
    channels: Sequence[str] = (),
    projects: Sequence[str] = (),
    expires: str = NEVER,
    now: float | None = None,
) -> tuple[str, IssuedKey]:
    """Returns the key, which is stored nowhere, and its entry in the file."""
    name = name or role.value
    _check(role, name, channels, projects)
    now = time.time() if now is None else now
    key = ISSUED_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    issued = IssuedKey(
        id=f"{name}-{secrets.token_hex(ID_BYTES)}",
        name=name,
        role=role,
        digest=digest_of(key.encode()),
        channels=tuple(channels),
        projects=tuple(projects),
        created_at=now,
        expires_at=None if expires == NEVER else now + _seconds(expires),
    )
    with _changing(path) as keys:
        keys.append(issued)
    return key, issued


def revoke_key(path: Path, key_id: str, *, now: float | None = None) -> IssuedKey:
    """BadRequest if there is no key with that id. A key that is revoked already stays as it is."""
    with _changing(path) as keys:
        place = next((place for place, key in enumerate(keys) if key.id == key_id), None)
        if place is None:
            raise BadRequest(f"{path} has no key {key_id!r}; `stepwell keys list` shows those that it has")
        if keys[place].revoked_at is None:
            keys[place] = replace(keys[place], revoked_at=time.time() if now is None else now)
        return keys[place]


@contextmanager
def _changing(path: Path) -> Iterator[list[IssuedKey]]:
    """The keys, which are written back at the end of the block. Others wait, by a lock on the folder."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY)
    except OSError as failure:
        raise BadRequest(f"{path.absolute().parent} cannot be used: {failure.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = read_keys(path)
        yield keys
        with replacing_file(path) as file:
            file.write(orjson.dumps({"keys": [asdict(key) for key in keys]}, option=orjson.OPT_INDENT_2))
    finally:
        os.close(folder)


def _read(entry: Mapping[str, object]) -> IssuedKey:
    lists = {name: tuple(map(str, entry.get(name, ()))) for name in ("channels", "projects")}  # type: ignore[call-overload]
    return IssuedKey(**{**entry, **lists, "role": Role(entry["role"])})  # type: ignore[arg-type]


def _check(role: Role, name: str, channels: Sequence[str], projects: Sequence[str]) -> None:
    if role is Role.TRAJECTORY:
        raise BadRequest("the gateway makes the keys of trajectories, when they are opened")
    if not NAME.fullmatch(name):
        raise BadRequest(f"the name {name!r} is not of lower-case letters, digits, - and _, at most 40")
    for scope in (*channels, *projects):
        if not CHANNEL.fullmatch(scope):
            raise BadRequest(f"{scope!r} is not the name of a channel or a project")
    if role in UNSCOPED and (channels or projects):
        raise BadRequest(f"the role {role} sees all channels; a key with a channel or a project cannot have it")
    if role is Role.SESSION and (len(channels) > 1 or projects):
        raise BadRequest("the sessions of a key are in one channel: give one --channel and no --project")


def _seconds(duration: str) -> float:
    seconds = read_duration(duration)
    if not seconds or seconds > LONGEST:
        raise BadRequest(f"{duration!r} is not a time such as 12h, 30d or 8w, or {NEVER}")
    return seconds
