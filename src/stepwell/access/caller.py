"""Who makes a request: the role of its key, and the channels that the key is for.

- A server puts the Caller into the ASGI scope after it has checked the key. A handler that finds none fails.
- A project is the first part of a channel's name: `search.train` and `search` are channels of the project `search`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from stepwell.errors import NotPermitted

CALLER = "stepwell.caller"
"""The key under which the ASGI scope has the caller."""
PROJECT_MARK = "."
"""The URLs of the Atropos server have room for it in the name of a channel, and for no slash."""


class Role(StrEnum):
    """The purpose of a key. The admin may do everything."""

    TRAJECTORY = "trajectory"
    """The agent in one trajectory. The gateway makes these keys; no key file has one."""
    SESSION = "session"
    """An agent, or a person, who opens sessions."""
    RUNNER = "runner"
    """Opens, completes and aborts trajectories, and submits steps."""
    REWARD = "reward"
    """Gives rewards."""
    TRAINER = "trainer"
    """Takes batches."""
    ENVIRONMENT = "environment"
    """An environment at the Atropos server."""
    CURATOR = "curator"
    """Reads everything at the dashboard, and marks, rejects and relabels."""
    VIEWER = "viewer"
    """Reads states, metrics and the dashboard."""
    ADMIN = "admin"

    @classmethod
    def _missing_(cls, value: object) -> "Role | None":
        """Key files of 0.2 call an environment `door`."""
        return cls.ENVIRONMENT if value == "door" else None


UNSCOPED = (Role.CURATOR, Role.VIEWER, Role.ADMIN)
"""Roles that see all channels at once."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The holder of a session key, as the key describes it."""

    user: str = ""
    is_captured: bool = True
    """False: calls with this key are not recorded."""
    channel: str | None = None
    """The channel of its sessions, if it is not the usual one."""


@dataclass(frozen=True, slots=True)
class Caller:
    id: str
    """The id of the key, as `stepwell keys list` shows it; empty if no keys are checked."""
    role: Role
    channels: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    session: SessionKey | None = None
    """The content of a key with the role session."""
    is_issued: bool = False
    """The key is in a key file, and so it can be revoked."""

    @property
    def is_scoped(self) -> bool:
        return bool(self.channels or self.projects)

    @property
    def quota_name(self) -> str:
        """Whose quota the calls of a session key take, and those in the sessions that it opened. Empty for others."""
        return f"user {self.session.user}" if self.session is not None and self.session.user else ""

    @property
    def may_opt_out(self) -> bool:
        """Whether a call may say that it is not recorded. An agent cannot: it would hide its own steps."""
        return self.role in (Role.ADMIN, Role.RUNNER)

    @property
    def scope_text(self) -> str:
        parts = [f"channel {name}" for name in self.channels] + [f"project {name}" for name in self.projects]
        return ", ".join(parts)

    def may_use(self, channel: str | None) -> bool:
        """Whether the key is for that channel. None, a channel that is not known, is for keys without a scope."""
        if not self.is_scoped:
            return True
        if channel is None:
            return False
        return channel in self.channels or channel.partition(PROJECT_MARK)[0] in self.projects

    def require_channel(self, channel: str | None) -> None:
        if not self.may_use(channel):
            which = "a channel that the pool does not tell" if channel is None else f"the channel {channel}"
            raise NotPermitted(f"the key {self.id} is for {self.scope_text}; this is in {which}")

    def channel_or_own(self, channel: str | None) -> str | None:
        """The channel that a request names, or the only one of the key."""
        return self.channels[0] if channel is None and len(self.channels) == 1 and not self.projects else channel


ANYONE = Caller("", Role.ADMIN)
"""The caller where no keys are checked."""
AGENT = Caller("", Role.TRAJECTORY)
"""The caller that has the key of the trajectory which the URL names."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """The caller in an ASGI scope that a server has checked."""
    return cast("Caller", scope[CALLER])
