"""What serves the policy: its version, a canary, the engines, and adapters of single channels. A pool's first shard has
it for gateways and trainers."""

from dataclasses import dataclass, replace

from stepwell.common.message_format import message
from stepwell.pool.api.policy import WITHDRAWN_KEPT, Canary, PolicyAction


@message
@dataclass(frozen=True, slots=True)
class ChannelPolicy:
    """What serves the calls of one channel, if not the policy of the pool."""

    channel: str
    adapter: str = ""
    """As engines call it; another name for every version. Empty: the engines' own weights."""
    version: int = 0
    """Of the adapter."""
    paused: bool = False
    """Gateways hold the channel's new calls."""


@message
@dataclass(frozen=True, slots=True)
class Serving:
    policy_version: int = 0
    engines: tuple[str, ...] | None = None
    """Addresses, in the order in which they joined; None if nobody has named one yet."""
    revision: int = 0
    """Grows with every change, as long as the shard's process lives."""
    epoch: str = ""
    """Names the shard's process. One without a journal begins again, so revisions of two processes do not compare."""

    canary: Canary | None = None
    """A newer version, which a share of the sessions gets."""
    withdrawn: tuple[int, ...] = ()
    """Versions that were refused or rolled back, the oldest first."""
    channels: tuple[ChannelPolicy, ...] = ()
    """Channels with a policy of their own, in the order of their names."""

    def channel(self, name: str) -> ChannelPolicy:
        return next((found for found in self.channels if found.channel == name), ChannelPolicy(name))

    def version_of(self, channel: str) -> int:
        """The version that counts for the staleness of the channel's steps."""
        own = self.channel(channel) if self.channels else None
        return own.version if own and own.adapter else self.policy_version

    def withdrawn_of(self, channel: str) -> tuple[int, ...]:
        """Adapters have numbers of their own, and none of them is withdrawn."""
        return () if self.withdrawn and self.channel(channel).adapter else self.withdrawn

    def with_channel(self, policy: ChannelPolicy) -> "Serving":
        others = (other for other in self.channels if other.channel != policy.channel)
        return replace(self, channels=tuple(sorted((*others, policy), key=lambda found: found.channel)))

    def is_older_than(self, other: "Serving") -> bool:
        return self.epoch == other.epoch and self.revision < other.revision

    def changed(self, add: tuple[str, ...], remove: tuple[str, ...]) -> tuple[str, ...]:
        """The engines after some have joined and others have left."""
        return tuple(address for address in dict.fromkeys((*(self.engines or ()), *add)) if address not in remove)

    def withdrawn_after(self, action: PolicyAction, version: int) -> tuple[int, ...]:
        """The withdrawn versions after a decision. A version that is served again is no longer withdrawn."""
        others = tuple(other for other in self.withdrawn if other != version)
        return (*others, version)[-WITHDRAWN_KEPT:] if action in ("refuse", "rollback") else others
