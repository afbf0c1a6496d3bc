"""A new version of the policy on its way to all sessions: its canary, what the versions earned, what was decided.

- The pool's `policy_version` is the version that all sessions get, except those of the canary.
- There is at most one canary. Its engines serve a share of the sessions; the other engines serve the rest.
- A version that was refused or rolled back is withdrawn: engines that have it get no calls, and steps that it said are
  not trained.
- The last decisions are kept, each with its reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from stepwell.common.message_format import message

PolicyAction: TypeAlias = Literal["refuse", "canary", "overdue", "promote", "rollback"]
"""`refuse`: the version did not pass validation and was given to no session. `overdue`: an alarm, the canary goes on
without a decision."""
DECISIONS_KEPT = 200
WITHDRAWN_KEPT = 200
VERSION_REWARDS_KEPT = 10_000
"""The number of rewards that each shard keeps for each channel."""


@message
@dataclass(frozen=True, slots=True)
class Canary:
    version: int
    engines: tuple[str, ...]
    """The addresses of the engines that have its weights."""
    share: float
    """The share of the sessions that get the version, from 0 to 1."""
    began_at: float
    """Seconds since 1970."""


@message
@dataclass(frozen=True, slots=True)
class PolicyDecision:
    version: int
    action: PolicyAction
    by: str
    """`guard`, or the operator's name."""
    reason: str
    at: float
    """Seconds since 1970."""


@message
@dataclass(frozen=True, slots=True)
class VersionReward:
    """The first reward that something got which one version of the policy said."""

    version: int
    reward: float
    trajectory_uid: str


@message
@dataclass(frozen=True, slots=True)
class RewardTally:
    """The rewards of one version of the policy."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def __add__(self, other: "RewardTally") -> "RewardTally":
        return RewardTally(self.count + other.count, self.total + other.total)


@message
@dataclass(frozen=True, slots=True)
class ShardRewards:
    """One shard's part of VersionRewards."""

    rewards: Sequence[VersionReward]
    cursor: str
    missed: int


@message
@dataclass(frozen=True, slots=True)
class VersionRewards:
    rewards: Sequence[VersionReward]
    """In the order in which they were given, as far as one shard has them."""
    cursor: dict[str, str]
    """For the next call: where each shard's rewards ended."""
    missed: int = 0
    """Rewards that were dropped before anyone asked for them, at least: a shard without a journal that has restarted
    does not know how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """What serves which sessions, and why."""

    policy_version: int
    canary: Canary | None
    withdrawn: tuple[int, ...] = ()
    """Versions that were refused or rolled back, the oldest first."""
    decisions: Sequence[PolicyDecision] = ()
    """The last ones, the oldest first."""
    rewards: Mapping[int, RewardTally] = field(default_factory=dict)
    """By version, of the last rewards of one channel."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer. Their rewards are not counted."""

    @property
    def alarm(self) -> str | None:
        """Why the canary has no decision yet, if it should have one by now."""
        own = [found for found in self.decisions if self.canary is not None and found.version == self.canary.version]
        return own[-1].reason if own and own[-1].action == "overdue" else None


def tally_rewards(rewards: Iterable[VersionReward]) -> dict[int, RewardTally]:
    """By version."""
    tallies: dict[int, RewardTally] = {}
    for reward in rewards:
        tallies[reward.version] = tallies.get(reward.version, RewardTally()) + RewardTally(1, reward.reward)
    return tallies


@message
@dataclass(frozen=True, slots=True)
class ChannelPolicy:
    """What serves the calls of one channel, if not the policy of the pool."""

    channel: str
    adapter: str = ""
    """The engines' name for the adapter; every version has another name. Empty: the engines' own weights."""
    version: int = 0
    """The version of the adapter."""
    paused: bool = False
    """Gateways hold the channel's new calls."""


@message
@dataclass(frozen=True, slots=True)
class Serving:
    """What serves the policy: its version, a canary, the engines, and adapters of single channels. A pool's first shard
    has it for gateways and trainers."""

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
