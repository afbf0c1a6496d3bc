"""The settings of `stepwell keys create`, `list` and `revoke`, and of `stepwell audit verify`."""

from typing import Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from stepwell.config.sections import Listed, Section


class KeysSection(Section):
    keys_file: str | None = None
    """The --keys-file of the servers; without it, that of `stepwell up` in this folder."""


class CreateKeySettings(KeysSection):
    """Make a key with a role, and print it. This is the only time that it is shown: the file has its hash.

    Servers that were started with the file accept it within a second.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_KEYS_")

    role: Literal["session", "runner", "reward", "trainer", "door", "curator", "viewer", "admin"]
    """What the key is for; docs/operations/security.md lists what each role may call."""
    name: str = ""
    """Of its holder, in lower-case letters, digits, - and _. The key's id begins with it; without it, with the role."""
    channel: Listed = ()
    """Channels that the key is for, separated by commas; without any, all."""
    project: Listed = ()
    """Projects that the key is for, separated by commas: all channels NAME and NAME.…"""
    expires: str = "90d"
    """When the key becomes void: after 12h, 30d or 8w, or never."""


class ListKeysSettings(KeysSection):
    """Show the keys of a file: their ids, roles and scopes, and until when they are valid."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_KEYS_")

    as_json: bool = Field(default=False, alias="json")
    """Print it as JSON."""


class RevokeKeySettings(KeysSection):
    """Make a key void, and the keys of all trajectories that were opened with it. Servers refuse it within a second."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_KEYS_")

    id: CliPositionalArg[str]
    """The key's id, as `stepwell keys list` shows it."""


class AuditVerifySettings(Section):
    """Check that no line of an audit log was changed, removed or moved, and print the hash of its last line.

    Note that hash in another place: with --seen, a later check finds out whether lines at the end were cut off.
    """

    model_config = SettingsConfigDict(env_prefix="STEPWELL_AUDIT_")

    file: CliPositionalArg[str]
    """The --audit-log of a server."""
    seen: str = ""
    """A hash that an earlier check has printed: the file must still have that line."""
