"""Which engines and which versions of the policy serve the calls, and what these versions earned.

The first shard has the canary, the decisions and the list of engines. Each shard has the rewards of its own groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stepwell.common.message_format import message
from stepwell.pool.api.policy import Canary, PolicyDecision, RewardTally, Serving, ShardRewards, VersionRewards
from stepwell.pool.shard.operation import MergedOperation, Operation, ShardRoute

if TYPE_CHECKING:
    from stepwell.pool.shard.shard import Shard

Tallies: TypeAlias = dict[int, RewardTally]
FROM_THE_START = ":0"
"""The cursor of a shard that was not there when the others' were given."""
FROM_NOW_ON = ""
"""The cursor of a shard that did not answer when the first ones were given."""


@message
@dataclass(frozen=True, slots=True)
class PauseChannel(Operation[Serving]):
    """Gateways hold the channel's new calls, or no longer."""

    channel: str
    paused: bool
    route = ShardRoute.FIRST
    over_network = True

    def run(self, shard: "Shard") -> Serving:
        shard.pool.state.pause_channel(self.channel, paused=self.paused)
        return shard.serving


@message
@dataclass(frozen=True, slots=True)
class ChangeEngines(Operation[Serving]):
    """Engines join and leave."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    route = ShardRoute.FIRST
    over_network = True

    def run(self, shard: "Shard") -> Serving:
        shard.pool.state.change_engines(self.add, self.remove)
        return shard.serving


@message
@dataclass(frozen=True, slots=True)
class ReportEngines(Operation[bool]):
    """A gateway tells which version each of its engines reports (see EngineReports). True if a trainer lives that syncs
    weights."""

    gateway: str
    versions: Mapping[str, int | None]
    route = ShardRoute.FIRST
    changes = False
    over_network = True

    def run(self, shard: "Shard") -> bool:
        shard.engine_reports.note(self.gateway, self.versions)
        return shard.engine_reports.is_sync_expected


@message
@dataclass(frozen=True, slots=True)
class WhyUnreported(Operation[str | None]):
    """Why the policy cannot have this version: no engine reports it."""

    version: int
    route = ShardRoute.FIRST
    changes = False

    def run(self, shard: "Shard") -> str | None:
        return shard.engine_reports.why_unreported(self.version, shard.gateways.living())


@message
@dataclass(frozen=True, slots=True)
class AnnounceSync(Operation[None]):
    """A trainer lives that syncs weights. Whoever waits for that hears of it."""

    route = ShardRoute.FIRST

    def run(self, shard: "Shard") -> None:
        shard.engine_reports.announce_sync()


@message
@dataclass(frozen=True, slots=True)
class Decide(Operation[Serving]):
    """A decision about a version of the policy, and what follows from it, in one change."""

    decision: PolicyDecision
    canary: Canary | None = None
    policy_version: int | None = None
    route = ShardRoute.FIRST

    def run(self, shard: "Shard") -> Serving:
        shard.pool.decide(self.decision, self.canary, self.policy_version)
        return shard.serving


@message
@dataclass(frozen=True, slots=True)
class ReadDecisions(Operation[list[PolicyDecision]]):
    """The last ones about versions of the policy, the oldest first."""

    route = ShardRoute.FIRST
    changes = False
    over_network = True

    def run(self, shard: "Shard") -> list[PolicyDecision]:
        return list(shard.pool.state.decisions)


@message
@dataclass(frozen=True, slots=True)
class ReadVersionRewards(MergedOperation[ShardRewards, VersionRewards]):
    """The rewards since the cursor; without one, only where they end now. They are in the journal before they are told,
    so that none is told twice. A shard that does not answer is read later."""

    channel: str
    cursor: dict[str, str] | None = None
    """By shard."""

    def run(self, shard: "Shard") -> ShardRewards:
        log, end = shard.pool.state.version_rewards, shard.pool.state.version_rewards.end(self.channel)
        told = f"{shard.epoch}:{end}"
        since = None if self.cursor is None else self.cursor.get(shard.name, FROM_THE_START)
        if not since:
            return ShardRewards([], told, 0)
        epoch, _, position = since.rpartition(":")
        seen, first = int(position), log.first(self.channel)
        is_lost = seen > end or (epoch not in ("", shard.epoch) and seen > first)
        if is_lost:  # without a journal, the counting has begun again
            return ShardRewards(log.since(self.channel, 0), told, 1)
        return ShardRewards(log.since(self.channel, seen), told, max(0, first - seen))

    def merge(self, parts: Mapping[str, ShardRewards], missing: tuple[str, ...]) -> VersionRewards:
        given, unread = self.cursor or {}, FROM_NOW_ON if self.cursor is None else FROM_THE_START
        ends = {name: part.cursor for name, part in parts.items()}
        return VersionRewards(
            rewards=[reward for part in parts.values() for reward in part.rewards],
            cursor={name: given.get(name, unread) for name in missing} | ends,
            missed=sum(part.missed for part in parts.values()),
        )


@message
@dataclass(frozen=True, slots=True)
class ReadRewardTallies(MergedOperation[Tallies, tuple[Tallies, tuple[str, ...]]]):
    """By version of the policy, of the last rewards; and the shards that did not answer."""

    channel: str
    changes = False
    over_network = True

    def run(self, shard: "Shard") -> Tallies:
        return shard.pool.state.version_rewards.tallies(self.channel)

    def merge(self, parts: Mapping[str, Tallies], missing: tuple[str, ...]) -> tuple[Tallies, tuple[str, ...]]:
        tallies: Tallies = {}
        for part in parts.values():
            for version, tally in part.items():
                tallies[version] = tallies.get(version, RewardTally()) + tally
        return dict(sorted(tallies.items())), missing
