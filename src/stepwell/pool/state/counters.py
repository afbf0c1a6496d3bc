"""The numbers of a pool that are not in its records, and their form in the journal."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepwell.pool.api.serving_state import Serving
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
    refused: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    failed_judgements: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """The journal has the last three as plain mappings."""
        for name in ("refused", "quarantined", "failed_judgements"):
            setattr(self, name, Counter(getattr(self, name)))

    def continue_after(self, groups: Iterable[Group]) -> None:
        """No number of these groups, their trajectories and steps is given again."""
        for group in groups:
            self.opened = max(self.opened, group.seq)
            for trajectory in group.trajectories.values():
                self.registered = max(self.registered, trajectory.number)
                self.arrived = max([self.arrived, *(step.number for step in trajectory.steps.values())])


def dump_numbers(serving: Serving, counters: Counters, channels: Mapping[str, Channel]) -> dict[str, Any]:
    """In plain values; `load_ledger` and `Counters` take them back."""
    return {
        "policy_version": serving.policy_version,
        "engines": serving.engines,
        "counters": {name: getattr(counters, name) for name in Counters.__slots__},
        "units": {name: channel.unit for name, channel in channels.items()},
        "ledgers": {name: _dump_ledger(channel.ledger) for name, channel in channels.items()},
    }


def _dump_ledger(ledger: Ledger) -> list[Any]:
    dropped = {cause: _plain(count) for cause, count in ledger.dropped.items()}
    left_out = {kind: _plain(count) for kind, count in ledger.left_out.items()}
    return [_plain(ledger.accepted), _plain(ledger.shipped), dropped, left_out]


def load_ledger(plain: Any) -> Ledger:
    """An older journal lacks `left_out`."""
    accepted, shipped, *named = plain
    counts = ({name: StepCount(*count) for name, count in part.items()} for part in named)
    return Ledger(StepCount(*accepted), StepCount(*shipped), *counts)


def _plain(count: StepCount) -> list[int]:
    return [count.steps, count.tokens]
