"""Validation: at intervals of policy versions, each prompt of a dataset once, on a channel of its own."""

import time
from dataclasses import dataclass, field

from stepwell.agents.dataset import Dataset
from stepwell.agents.flow import AgentFlow
from stepwell.agents.rollout import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    flow: AgentFlow
    """On another channel than training, with its own group size and possibly another agent."""
    dataset: Dataset
    every: int = 10
    """Policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    policy_version: int | None
    """At the start of the round; None if no engine reports a number. The weights may change during a round."""
    mean_reward: float | None
    """Of the rollouts that their agent scored; None if there is none."""
    scored: int
    completed: int
    failed: int
    """Failed attempts, including those that were retried."""
    seconds: float


@dataclass(slots=True)
class ValidationRound:
    """A validation in progress."""

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


class ValidationSchedule:
    """When to validate: at the start, then each time the version has grown by `every`."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._next: int | None = None

    def is_due(self, version: int | None) -> bool:
        """An unknown version counts as 0: the weights that an engine starts with have no number."""
        return self._next is None or (version or 0) >= self._next

    def begin(self, version: int | None) -> None:
        self._next = (version or 0) + self._every
