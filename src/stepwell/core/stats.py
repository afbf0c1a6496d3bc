"""What a pool did and holds, in numbers.

What always holds: submitted = accepted + quarantined + refused, and per channel accepted = held + shipped + dropped.
Nothing leaves the pool without being counted under a cause.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell.core.step import Step


@dataclass(slots=True)
class Tally:
    """Steps and their tokens."""

    steps: int = 0
    tokens: int = 0

    def add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.steps += 1
            self.tokens += step.tokens


@dataclass(slots=True)
class Ledger:
    """Every accepted step of a channel, by what became of it."""

    accepted: Tally = field(default_factory=Tally)
    shipped: Tally = field(default_factory=Tally)
    dropped: dict[str, Tally] = field(default_factory=dict)
    """By cause: evicted (the queue was full), aborted (the rollout failed)."""

    def drop(self, cause: str, steps: Iterable[Step]) -> None:
        self.dropped.setdefault(cause, Tally()).add(steps)

    def held(self) -> Tally:
        gone = [self.shipped, *self.dropped.values()]
        return Tally(
            self.accepted.steps - sum(tally.steps for tally in gone),
            self.accepted.tokens - sum(tally.tokens for tally in gone),
        )


@dataclass(frozen=True, slots=True)
class ChannelStats:
    groups: int
    ready_groups: int
    trajectories: int
    """Registered and not yet shipped or dropped."""
    held: Tally
    accepted: Tally
    shipped: Tally
    dropped: dict[str, Tally]


@dataclass(frozen=True, slots=True)
class PoolStats:
    policy_version: int
    channels: dict[str, ChannelStats]
    submitted: int
    refused: Counter[str]
    """Steps by cause: duplicate, late, unknown, mixed_indexes."""
    quarantined: Counter[str]
    """Steps by kind of fault."""
