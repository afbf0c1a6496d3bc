"""`stepwell keys create`, `list` and `revoke`, and `stepwell audit verify`."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from stepwell.access import audit_log
from stepwell.access.caller import Role
from stepwell.access.key_file import IssuedKey, create_key, read_keys, revoke_key
from stepwell.config.key_commands import (
    AuditVerifySettings,
    CreateKeySettings,
    KeysSection,
    ListKeysSettings,
    RevokeKeySettings,
)
from stepwell.errors import BadRequest, Conflict
from stepwell.up.state_folder import this_folder


def run_create(settings: CreateKeySettings) -> None:
    key, issued = create_key(
        _file(settings),
        Role(settings.role),
        name=settings.name,
        channels=settings.channel,
        projects=settings.project,
        expires=settings.expires,
    )
    sys.stdout.write(f"{key}\n")
    sys.stderr.write(f"{_line(issued, time.time())}\n")


def run_list(settings: ListKeysSettings) -> None:
    keys = read_keys(_file(settings))
    for line in _as_json(keys) if settings.as_json else key_lines(keys, time.time()):
        sys.stdout.write(f"{line}\n")


def run_revoke(settings: RevokeKeySettings) -> None:
    sys.stdout.write(f"{_line(revoke_key(_file(settings), settings.id), time.time())}\n")


def run_verify(settings: AuditVerifySettings) -> None:
    try:
        with Path(settings.file).open("rb") as file:
            found = audit_log.verify(file, settings.seen)
    except OSError as failure:
        raise BadRequest(f"{settings.file} cannot be read: {failure.strerror}") from None
    if found.fault:
        raise Conflict(f"{settings.file}: {found.fault}")
    sys.stdout.write(f"{found.lines} lines, unbroken; the last has the hash {found.last}\n")


def key_lines(keys: Sequence[IssuedKey], now: float) -> Iterator[str]:
    for key in keys:
        yield _line(key, now)
    if not keys:
        yield "no keys"


def _line(key: IssuedKey, now: float) -> str:
    state = key.why_void(now)
    if not state:
        state = "valid" if key.expires_at is None else f"valid until {_day(key.expires_at)}"
    return " · ".join(filter(None, (key.id, key.role, key.caller().scope_text, f"made {_day(key.created_at)}", state)))


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _as_json(keys: Sequence[IssuedKey]) -> Iterator[str]:
    """Without the hashes, which nobody needs."""
    shown = [{name: value for name, value in asdict(key).items() if name != "digest"} for key in keys]
    yield json.dumps(shown, indent=2)


def _file(settings: KeysSection) -> Path:
    if settings.keys_file is not None:
        return Path(settings.keys_file)
    folder = this_folder()
    if not folder.path.is_dir():
        raise BadRequest(f"there is no {folder.path.name} of `stepwell up` here; give --keys-file FILE")
    return folder.issued_keys
