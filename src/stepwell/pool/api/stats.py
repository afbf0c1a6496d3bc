"""What a pool did and holds, in numbers.

What always holds: submitted = accepted + quarantined + refused, and per channel accepted = held + shipped + left out +
dropped. Nothing leaves the pool without being counted under a cause; what is under lease is held until it is
acknowledged (or, where single steps are lent, until their rollout is dropped).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.pool.state.stored_step import HeldStep
from stepwell.steps.step_filter import StepFilter


@dataclass(slots=True)
class Tally:
    """Steps and their tokens."""

    steps: int = 0
    tokens: int = 0

    def add(self, steps: Iterable[HeldStep]) -> None:
        for step in steps:
            self.add_one(step)

    def add_one(self, step: HeldStep) -> None:
        self.steps += 1
        self.tokens += step.prompt_length + step.response_length

    def add_many(self, steps: int, tokens: int) -> None:
        self.steps += steps
        self.tokens += tokens

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(self.steps - other.steps, self.tokens - other.tokens)


@dataclass(slots=True)
class Ledger:
    """Every accepted step of a channel, by what became of it."""

    accepted: Tally = field(default_factory=Tally)
    shipped: Tally = field(default_factory=Tally)
    """Taken by a trainer and acknowledged."""
    dropped: dict[str, Tally] = field(default_factory=dict)
    """By cause: evicted (the queue was full), aborted (the rollout failed), deadline, stale, reward_failed, cleared,
    rejected (by a person)."""
    left_out: dict[str, Tally] = field(default_factory=dict)
    """Not wanted by the trainer whose turn they were, by kind: exactness, or what marks them untrainable."""

    def drop(self, cause: str, steps: Iterable[HeldStep]) -> None:
        tally = Tally()
        tally.add(steps)
        if tally.steps:
            self.dropped[cause] = self.dropped.get(cause, Tally()) + tally

    def settle(self, steps: Iterable[HeldStep], step_filter: StepFilter) -> str:
        """Count steps of a consumer: those its filter accepts are trained. If there is none, gives a kind of reason."""
        left_out, trained = "", False
        for step in steps:
            kind = step_filter.rejection_kind(step)
            if kind is None:
                trained = True
                self.shipped.add_one(step)
            else:
                left_out = kind
                self.left_out.setdefault(kind, Tally()).add_one(step)
        return "" if trained else left_out

    def held(self) -> Tally:
        gone = sum([*self.dropped.values(), *self.left_out.values()], self.shipped)
        return self.accepted - gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    groups: int
    ready_groups: int
    ready_by_source: Counter[str]
    """The same, by where they come from."""
    trajectories: int
    """Registered and not yet taken or dropped."""
    nbytes: int
    """Of tokens, log-probabilities and masks, as stored."""
    history_groups: int
    held: Tally
    """Under lease included."""
    accepted: Tally
    shipped: Tally
    dropped: Mapping[str, Tally]
    """By cause."""
    left_out: Mapping[str, Tally]
    """By kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringStats:
    """What reward workers did and have to do; all 0 where no reward is required."""

    waiting: int
    """Trajectories that lack a reward and can be taken."""
    under_way: int
    """With a worker."""
    resting: int
    """Failed to be scored, and will be offered again in a moment."""
    scored: int
    """Judgements that became a reward."""
    failed: Counter[str]
    """Judgements that did not, by outcome: error, timeout."""
    late: int
    """Judgements of what had been scored, changed, dropped or offered again since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    policy_version: int
    channels: Mapping[str, ChannelStats]
    submitted: int
    refused: Counter[str]
    """Steps by cause: duplicate, late, unknown, mixed_indexes, full."""
    quarantined: Counter[str]
    """Steps by kind of fault."""
    leases: int
    forks: int
    """How often a step did not continue what its trajectory held before it."""
    scoring: ScoringStats


def merge_stats(parts: Sequence[PoolStats]) -> PoolStats:
    """The statistics of a pool from those of its shards."""
    names = sorted({name for part in parts for name in part.channels})
    return PoolStats(
        policy_version=max(part.policy_version for part in parts),
        channels={name: _merge_channel([p.channels[name] for p in parts if name in p.channels]) for name in names},
        submitted=sum(part.submitted for part in parts),
        refused=sum((part.refused for part in parts), Counter()),
        quarantined=sum((part.quarantined for part in parts), Counter()),
        leases=sum(part.leases for part in parts),
        forks=sum(part.forks for part in parts),
        scoring=_merge_scoring([part.scoring for part in parts]),
    )


def _merge_channel(parts: Sequence[ChannelStats]) -> ChannelStats:
    return ChannelStats(
        groups=sum(part.groups for part in parts),
        ready_groups=sum(part.ready_groups for part in parts),
        ready_by_source=sum((part.ready_by_source for part in parts), Counter()),
        trajectories=sum(part.trajectories for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        history_groups=sum(part.history_groups for part in parts),
        held=sum((part.held for part in parts), Tally()),
        accepted=sum((part.accepted for part in parts), Tally()),
        shipped=sum((part.shipped for part in parts), Tally()),
        dropped=_merge_tallies([part.dropped for part in parts]),
        left_out=_merge_tallies([part.left_out for part in parts]),
    )


def _merge_scoring(parts: Sequence[ScoringStats]) -> ScoringStats:
    return ScoringStats(
        waiting=sum(part.waiting for part in parts),
        under_way=sum(part.under_way for part in parts),
        resting=sum(part.resting for part in parts),
        scored=sum(part.scored for part in parts),
        failed=sum((part.failed for part in parts), Counter()),
        late=sum(part.late for part in parts),
    )


def _merge_tallies(parts: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    names = sorted({name for part in parts for name in part})
    return {name: sum((part.get(name, Tally()) for part in parts), Tally()) for name in names}
