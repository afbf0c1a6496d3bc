"""The numbers of a pool that are not in its records, and their form in the journal."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepwell.pool.api.policy import Canary, ChannelPolicy, Serving
from stepwell.pool.api.stats import StepCount
from stepwell.pool.state.channel_index import Channel
from stepwell.pool.state.ledger import Ledger
from stepwell.pool.state.records import Group


@dataclass(slots=True)
class Counters:
    """Numbers that only grow."""

    opened: int = 0
    registered: int = 0
    arrived: int = 0
    submitted: int = 0
    forks: int = 0
    in_grace: int = 0
    uniform_groups: int = 0
    scored: int = 0
    late_judgements: int = 0
    idle_ends: int = 0
    deferred: int = 0
    abstained_steps: int = 0
    unfinished: int = 0
    decided: Counter[str] = field(default_factory=Counter)
    """Decisions about versions of the policy, by action."""
    refused: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    failed_judgements: Counter[str] = field(default_factory=Counter)
    marked: Counter[str] = field(default_factory=Counter)
    """Marks of steps, by name, and those that do not count, by cause."""

    def __post_init__(self) -> None:
        """The journal has some as plain mappings."""
        for name in ("decided", "refused", "quarantined", "failed_judgements", "marked"):
            setattr(self, name, Counter(getattr(self, name)))

    def continue_after(self, groups: Iterable[Group]) -> None:
        """No number of these groups, their trajectories and steps is given again."""
        for group in groups:
            self.opened = max(self.opened, group.seq)
            for trajectory in group.trajectories.values():
                self.registered = max(self.registered, trajectory.number)
                self.arrived = max([self.arrived, *(step.number for step in trajectory.steps.values())])


def dump_numbers(serving: Serving, counters: Counters, channels: Mapping[str, Channel]) -> dict[str, Any]:
    """In plain values; `load_serving`, `load_ledger` and `Counters` take them back."""
    return {
        "policy_version": serving.policy_version,
        "engines": serving.engines,
        "canary": None if serving.canary is None else _dump_canary(serving.canary),
        "withdrawn": serving.withdrawn,
        "channel_policies": [_dump_channel(policy) for policy in serving.channels],
        "counters": {name: getattr(counters, name) for name in Counters.__slots__},
        "units": {name: channel.unit for name, channel in channels.items()},
        "ledgers": {name: _dump_ledger(channel.ledger) for name, channel in channels.items()},
    }


def load_serving(plain: Mapping[str, Any]) -> Serving:
    engines, canary = plain["engines"], plain["canary"]
    return Serving(
        plain["policy_version"],
        None if engines is None else tuple(engines),
        canary=None if canary is None else Canary(**canary | {"engines": tuple(canary["engines"])}),
        withdrawn=tuple(plain["withdrawn"]),
        channels=tuple(ChannelPolicy(*policy) for policy in plain["channel_policies"]),
    )


def _dump_canary(canary: Canary) -> dict[str, Any]:
    return {name: getattr(canary, name) for name in ("version", "engines", "share", "began_at")}


def _dump_channel(policy: ChannelPolicy) -> list[Any]:
    return [policy.channel, policy.adapter, policy.version, policy.paused]


def _dump_ledger(ledger: Ledger) -> list[Any]:
    dropped = {cause: _plain(count) for cause, count in ledger.dropped.items()}
    left_out = {kind: _plain(count) for kind, count in ledger.left_out.items()}
    return [_plain(ledger.accepted), _plain(ledger.shipped), dropped, left_out]


def load_ledger(plain: Any) -> Ledger:
    accepted, shipped, *named = plain
    counts = ({name: StepCount(*count) for name, count in part.items()} for part in named)
    return Ledger(StepCount(*accepted), StepCount(*shipped), *counts)


def _plain(count: StepCount) -> list[int]:
    return [count.steps, count.tokens]
