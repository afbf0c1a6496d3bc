"""The numbers of a pool that are not in its records, and their form in the journal.

A channel's ledger has every accepted step, by what became of it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from stepwell.pool.api.policy import Canary, ChannelPolicy, Serving
from stepwell.pool.api.stats import StepCount
from stepwell.pool.state.records import Group
from stepwell.pool.state.stored_step import StoredStep
from stepwell.steps.trainable import StepFilter, sampling_kind

RECENT = 1_000


@dataclass(slots=True)
class Ledger:
    accepted: StepCount = field(default_factory=StepCount)
    shipped: StepCount = field(default_factory=StepCount)
    """Taken by a trainer and acknowledged."""
    dropped: dict[str, StepCount] = field(default_factory=dict)
    """By cause: evicted (the queue was full), aborted (the rollout failed), deadline, stale, reward_failed, cleared,
    rejected (by a person), rolled_back (a version said it that was found bad), or why it was removed for good."""
    left_out: dict[str, StepCount] = field(default_factory=dict)
    """Steps that the trainer's step filter refused, by kind: exactness, model, or the kind of mark."""
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    """The `sampling_kind` of the last accepted steps. It is not journaled."""

    def accept(self, step: StoredStep) -> None:
        self.recent.append(sampling_kind(step.untrainable))
        self.accepted.steps += 1
        self.accepted.tokens += step.prompt_length + step.response_length

    def drop(self, cause: str, steps: Iterable[StoredStep]) -> None:
        count = count_steps(steps)
        if count.steps:
            self.dropped[cause] = self.dropped.get(cause, StepCount()) + count

    def ship(self, steps: Iterable[StoredStep], step_filter: StepFilter) -> str:
        """Count acknowledged steps as shipped or, if the filter refuses them, as left out.

        Returns a kind of refusal if none was shipped, otherwise an empty string.
        """
        refusal, shipped = "", False
        for step in steps:
            kind = step_filter.rejection_kind(step)
            if kind is None:
                shipped = True
                self.shipped.add(1, step.tokens)
            else:
                refusal = kind
                self.left_out.setdefault(kind, StepCount()).add(1, step.tokens)
        return "" if shipped else refusal

    def dump(self) -> dict[str, Any]:
        """In plain values, for the journal."""
        named = {"dropped": self.dropped, "left_out": self.left_out}
        counts = {name: {kind: astuple(count) for kind, count in counts.items()} for name, counts in named.items()}
        return {"accepted": astuple(self.accepted), "shipped": astuple(self.shipped), **counts}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> "Ledger":
        dropped, left_out = (
            {kind: StepCount(*count) for kind, count in plain[name].items()} for name in ("dropped", "left_out")
        )
        return cls(StepCount(*plain["accepted"]), StepCount(*plain["shipped"]), dropped, left_out)

    def repair(self, found: StepCount) -> None:
        """After damage to the journal: held steps that were not found are lost."""
        lost = self.held() - found
        if lost.steps < 0:  # the ledger itself is lost
            self.accepted -= lost
        elif lost.steps:
            self.dropped["corrupt"] = self.dropped.get("corrupt", StepCount()) + lost

    def held(self) -> StepCount:
        gone = sum([*self.dropped.values(), *self.left_out.values()], self.shipped)
        return self.accepted - gone


def count_steps(steps: Iterable[StoredStep]) -> StepCount:
    count = StepCount()
    for step in steps:
        count.add(1, step.tokens)
    return count


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

    def dump(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Counters.__slots__}

    def continue_after(self, groups: Iterable[Group]) -> None:
        """No number of these groups, their trajectories and steps is given again."""
        for group in groups:
            self.opened = max(self.opened, group.seq)
            for trajectory in group.trajectories.values():
                self.registered = max(self.registered, trajectory.number)
                self.arrived = max([self.arrived, *(step.number for step in trajectory.steps.values())])


def dump_serving(serving: Serving) -> dict[str, Any]:
    """In plain values; `load_serving` takes them back."""
    return {
        "policy_version": serving.policy_version,
        "engines": serving.engines,
        "canary": None if serving.canary is None else asdict(serving.canary),
        "withdrawn": serving.withdrawn,
        "channel_policies": [asdict(policy) for policy in serving.channels],
    }


def load_serving(plain: Mapping[str, Any]) -> Serving:
    engines, canary = plain["engines"], plain["canary"]
    return Serving(
        plain["policy_version"],
        None if engines is None else tuple(engines),
        canary=None if canary is None else Canary(**canary | {"engines": tuple(canary["engines"])}),
        withdrawn=tuple(plain["withdrawn"]),
        channels=tuple(ChannelPolicy(**policy) for policy in plain["channel_policies"]),
    )
