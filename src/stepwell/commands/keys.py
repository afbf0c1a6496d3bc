"""Keys and the record of their use: `stepwell gateway key`, `stepwell keys create`, `list` and `revoke`, and
`stepwell audit verify`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from stepwell.access import audit_log
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role, SessionKey
from stepwell.access.key_file import IssuedKey, create_key, read_keys, revoke_key
from stepwell.commands.sections import Listed, Section
from stepwell.commands.state_folder import this_folder
from stepwell.common.command_line import say
from stepwell.errors import BadRequest, Conflict


class SessionKeySettings(Section, env_prefix="STEPWELL_GATEWAY_"):
    """Print a session key, by which a user opens sessions at the gateways that have the same control key."""

    examples = ("stepwell gateway key --user ann",)

    user: str = Field(min_length=1, max_length=200)
    """Name of the user or the deployment; it is in the metadata of the sessions."""
    capture: Literal["on", "off"] = "on"
    """off: calls with this key are answered and not recorded."""
    control_keys: Listed = ()
    """Control keys of the gateways, separated by commas; the first one is used. Prefer the environment variable."""


class KeysSection(Section, env_prefix="STEPWELL_KEYS_"):
    keys_file: str | None = None
    """The --keys-file of the servers; without it, that of `stepwell up` in this folder."""


class CreateKeySettings(KeysSection):
    """Make a key with a role, and print it. This is the only time that it is shown: the file has its hash.

    Servers that were started with the file accept it within a second.
    """

    examples = ("stepwell keys create --role runner --name math-rollouts --channel math --expires 30d",)

    role: Literal["session", "runner", "reward", "trainer", "environment", "curator", "viewer", "admin", "door"]
    """The role of the key; docs/operations/security.md lists what each role may call.
    `door` is the name of `environment` in 0.2."""
    name: str = ""
    """The name of the key's holder, in lower-case letters, digits, - and _. The key's id begins with it; without it,
    with the role."""
    channel: Listed = ()
    """Channels that the key is for, separated by commas; without any, all."""
    project: Listed = ()
    """Projects that the key is for, separated by commas: all channels NAME and NAME.…"""
    expires: str = "90d"
    """When the key becomes void: after 12h, 30d or 8w, or never."""


class ListKeysSettings(KeysSection):
    """Show the keys of a file: their ids, roles and scopes, and until when they are valid."""

    examples = ("stepwell keys list",)

    as_json: bool = Field(default=False, alias="json")
    """Print it as JSON."""


class RevokeKeySettings(KeysSection):
    """Make a key void, and the keys of all trajectories that were opened with it. Servers refuse it within a second."""

    examples = ("stepwell keys revoke math-rollouts-1f0c9a3e",)

    id: CliPositionalArg[str]
    """The key's id, as `stepwell keys list` shows it."""


class AuditVerifySettings(Section, env_prefix="STEPWELL_AUDIT_"):
    """Check that no line of an audit log was changed, removed or moved, and print the hash of its last line.

    Note that hash in another place: with --seen, a later check finds out whether lines at the end were cut off.
    """

    examples = ("stepwell audit verify audit.jsonl",)

    file: CliPositionalArg[str]
    """The --audit-log of a server."""
    seen: str = ""
    """A hash that an earlier check has printed: the file must still have that line."""


def run_gateway_key(settings: SessionKeySettings) -> None:
    keys = AccessKeys(settings.control_keys)
    say(keys.session_key(SessionKey(settings.user, settings.capture == "on")))


def run_create(settings: CreateKeySettings) -> None:
    key, issued = create_key(
        _file(settings),
        Role(settings.role),
        name=settings.name,
        channels=settings.channel,
        projects=settings.project,
        expires=settings.expires,
    )
    say(key)
    sys.stderr.write(f"{_line(issued, time.time())}\n")


def run_list(settings: ListKeysSettings) -> None:
    keys, now = read_keys(_file(settings)), time.time()
    say(_as_json(keys) if settings.as_json else "\n".join(_line(key, now) for key in keys) or "no keys")


def run_revoke(settings: RevokeKeySettings) -> None:
    say(_line(revoke_key(_file(settings), settings.id), time.time()))


def run_verify(settings: AuditVerifySettings) -> None:
    try:
        with Path(settings.file).open("rb") as file:
            found = audit_log.verify(file, settings.seen)
    except OSError as failure:
        raise BadRequest(f"{settings.file} cannot be read: {failure.strerror}") from None
    if found.fault:
        raise Conflict(f"{settings.file}: {found.fault}")
    say(f"{found.lines} lines, unbroken; the last has the hash {found.last}")


def _line(key: IssuedKey, now: float) -> str:
    state = key.why_void(now)
    if not state:
        state = "valid" if key.expires_at is None else f"valid until {_day(key.expires_at)}"
    return " · ".join(filter(None, (key.id, key.role, key.caller().scope_text, f"made {_day(key.created_at)}", state)))


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _as_json(keys: Sequence[IssuedKey]) -> str:
    """The keys as JSON, without the hashes, which nobody needs."""
    shown = [{name: value for name, value in asdict(key).items() if name != "digest"} for key in keys]
    return json.dumps(shown, indent=2)


def _file(settings: KeysSection) -> Path:
    if settings.keys_file is not None:
        return Path(settings.keys_file)
    folder = this_folder()
    if not folder.path.is_dir():
        raise BadRequest(f"there is no {folder.path.name} of `stepwell up` here; give --keys-file FILE")
    return folder.issued_keys
