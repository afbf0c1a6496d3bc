"""A channel's ledger: every accepted step, by what became of it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell.pool.api.stats import StepCount
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
