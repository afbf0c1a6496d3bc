"""Validation: every so many policy versions, each prompt of a dataset once, on a channel of its own."""

import time
from dataclasses import dataclass, field

from stepwell.agents.dataset import Dataset
from stepwell.agents.flow import AgentFlow
from stepwell.agents.rollout import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    flow: AgentFlow
    """On another channel than the one for training, with a group size of its own; its agent may be another one too."""
    dataset: Dataset
    every: int = 10
    """Policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    policy_version: int | None
    """When the round began; None where no engine says it in a number. A round takes its time: weights may change
    meanwhile."""
    mean_reward: float | None
    """Over the rollouts that their agent scored; None if it scored none."""
    scored: int
    completed: int
    failed: int
    """Attempts that came to nothing, retried ones among them."""
    seconds: float


@dataclass(slots=True)
class Round:
    """A validation under way."""

    policy_version: int | None
    started: float = field(default_factory=time.monotonic)
    rewards: list[float] = field(default_factory=list)
    completed: int = 0
    failed: int = 0

    def add(self, result: RolloutResult) -> None:
        self.completed += result.is_completed
        self.failed += not result.is_completed
        if result.reward is not None:
            self.rewards.append(result.reward)

    def report(self) -> ValidationReport:
        return ValidationReport(
            policy_version=self.policy_version,
            mean_reward=sum(self.rewards) / len(self.rewards) if self.rewards else None,
            scored=len(self.rewards),
            completed=self.completed,
            failed=self.failed,
            seconds=time.monotonic() - self.started,
        )


class Rhythm:
    """When to validate: at the start, and then each time the version has grown by `every`."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._next: int | None = None

    def is_due(self, version: int | None) -> bool:
        """A version that is not known is taken for 0: the weights that an engine starts with have no number."""
        return self._next is None or (version or 0) >= self._next

    def begin(self, version: int | None) -> None:
        self._next = (version or 0) + self._every
